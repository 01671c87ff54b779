//! An operand of a GEMM on the host.

use super::super::elements::{with_codes, with_scales};
use super::layout::{Order, PANEL, b_len};
use crate::base::data::codes::{GemmCodes, GemmOperand, sizes};
use crate::base::error::{Result, shape_error};
use candle_core::Tensor;
use fp8_core::{Contraction, Format, ScaleGrid};
use half::bf16;

pub(super) const OP: &str = "fp8 gemm";

/// The elements of an operand in memory.
#[derive(Clone, Copy)]
pub(super) enum Elements<'a> {
    /// Codes, `[rows, cols]` of the grid.
    Codes(&'a [u8]),
    /// Codes in panels of kept indices, see `layout.rs`.
    Panels(Order, &'a [u8]),
    /// Values, `[rows, cols]` of the grid.
    Bf16(&'a [bf16]),
}

/// One operand: elements, the format of codes, scales, and which dimension is summed over.
pub(super) struct Side<'a> {
    pub(super) elements: Elements<'a>,
    pub(super) format: Format,
    pub(super) grid: ScaleGrid,
    pub(super) dequant_scales: &'a [f32],
    /// See [`GemmOperand::powers_of_two`].
    pub(super) powers_of_two: bool,
    pub(super) contraction: Contraction,
}

/// Calls `f` with the operand's slices; packed codes are in `order`.
pub(super) fn with_side<R>(
    order: Order,
    operand: &GemmOperand<'_>,
    f: impl FnOnce(&Side<'_>) -> Result<R>,
) -> Result<R> {
    let codes = match operand.codes {
        GemmCodes::RowMajor(codes) | GemmCodes::Packed(codes) => codes,
        GemmCodes::Transposed(codes) => {
            return Err(shape_error(
                OP,
                "transposed codes, which this device does not read,",
                "row-major codes",
                codes.dims(),
            ));
        }
    };
    let grid = operand.grid;
    let values = match operand.codes {
        GemmCodes::Packed(_) => b_len(order.panel(), operand.kept(), operand.contracted()),
        _ => grid.rows() * grid.cols(),
    };
    let check = |what, expected: usize, tensor: &Tensor| {
        if tensor.elem_count() == expected {
            return Ok(());
        }
        Err(shape_error(
            OP,
            what,
            format!(
                "{expected} elements for an operand of {}x{}",
                grid.rows(),
                grid.cols()
            ),
            tensor.dims(),
        ))
    };
    check("codes", values, codes)?;
    check("dequant_scale", grid.len(), operand.dequant_scale)?;
    with_codes(OP, codes, |codes| {
        with_scales(OP, operand.dequant_scale, |dequant_scales| {
            f(&Side {
                elements: match operand.codes {
                    GemmCodes::RowMajor(_) | GemmCodes::Transposed(_) => Elements::Codes(codes),
                    GemmCodes::Packed(_) => Elements::Panels(order, codes),
                },
                format: operand.format,
                grid: operand.grid,
                dequant_scales,
                powers_of_two: operand.powers_of_two,
                contraction: operand.contraction,
            })
        })
    })
}

impl Side<'_> {
    /// Size of the dimension that the result keeps.
    pub(super) fn kept(&self) -> usize {
        sizes(&self.grid, self.contraction).0
    }

    /// Size of the dimension that is summed over.
    pub(super) fn contracted(&self) -> usize {
        sizes(&self.grid, self.contraction).1
    }

    /// The dequant_scale of the element at these indices.
    pub(super) fn scale(&self, kept: usize, contracted: usize) -> f32 {
        self.dequant_scales[match self.contraction {
            Contraction::Cols => self.grid.index(kept, contracted),
            Contraction::Rows => self.grid.index(contracted, kept),
        }]
    }

    /// Length of the segments of the sum with one scale each, if there is more than one: these scales cannot wait for the
    /// end of the sum.
    pub(super) fn segment(&self) -> Option<usize> {
        let (scales, len) = match self.contraction {
            Contraction::Cols => (self.grid.scale_cols(), self.grid.block_cols()),
            Contraction::Rows => (self.grid.scale_rows(), self.grid.block_rows()),
        };
        (scales > 1).then_some(len)
    }

    /// The dequant_scale of each kept index over one segment of the sum.
    pub(super) fn scales_into(&self, first: usize, contracted: usize, scales: &mut [f32]) {
        if let &[scale] = self.dequant_scales {
            scales.fill(scale);
        } else {
            let len = scales.len().min(self.kept() - first);
            for (i, scale) in scales[..len].iter_mut().enumerate() {
                *scale = self.scale(first + i, contracted);
            }
            scales[len..].fill(1.);
        }
    }

    /// The bits of the dequant_scales of up to [`PANEL`] kept indices from `first` on, for each segment of the sum.
    pub(super) fn scale_bits(&self, first: usize, bits: &mut [[u32; PANEL]]) {
        let (scales, per_row) = (self.dequant_scales, self.grid.scale_cols());
        let cols = PANEL.min(self.kept() - first);
        match self.contraction {
            Contraction::Cols => {
                for col in 0..cols {
                    let scales = &scales[(first + col) / self.grid.block_rows() * per_row..];
                    for (bits, scale) in bits.iter_mut().zip(scales) {
                        bits[col] = scale.to_bits();
                    }
                }
            }
            Contraction::Rows => {
                for (bits, scales) in bits.iter_mut().zip(scales.chunks(per_row)) {
                    for (col, bits) in bits[..cols].iter_mut().enumerate() {
                        *bits = scales[(first + col) / self.grid.block_cols()].to_bits();
                    }
                }
            }
        }
    }
}
