//! Casts of values as they are computed; see `kernels/cast_made.cu`.

use super::arena::zeroed_cell;
use super::cast::is_plain;
use super::epilogue::sum_partials;
use super::gpu::{Buffer, Gpu, with_pointer_list};
use super::kernels::{Arg, FloatKernels, Shape, kernels};
use super::launch::launch;
use super::ops::activation::Sides;
use super::ops::norm::Norm;
use crate::base::data::codes::{Codes, Orientation};
use crate::base::data::made::{Made, MadeCast};
use crate::base::error::Result;
use crate::device::backend::MadeCasts;
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Format, Overflow};

kernels! { MADE_KERNELS in CAST_MADE;
    STORED = floats "fp8_cast_stored"("pppppplli");
    NORM = floats "fp8_cast_norm"("ppppppppplli");
    ACTIVATION = activations "fp8_cast_activation"("pplppppplli");
    GRADIENT = activations "fp8_cast_activation_gradient"("pplplppppplli");
}

const OP: &str = "quantize";

/// The edge of a tile, and threads of its block.
const TILE: usize = 128;
const THREADS: u32 = 256;

/// The kernels of `kernels/cast_made.cu`.
pub(crate) struct CudaMadeCasts;

impl MadeCasts for CudaMadeCasts {
    /// Casts as the hardware does them, without a division, of matrices that tiles of 16x16 fill, with rows that can be read 16 bytes at
    /// a time.
    fn supports(&self, made: &Made<'_>, cast: &Cast) -> bool {
        let (rows, cols) = made.matrix();
        let dtype = made.dtype();
        let fits = |x: &Tensor| {
            let offset = x.layout().start_offset() * dtype.size_in_bytes();
            x.dtype() == dtype && x.is_contiguous() && offset.is_multiple_of(16)
        };
        let halves = match made {
            Made::ActivationGradient { activation, .. } if activation.is_gated() => cols / 2,
            _ => cols,
        };
        is_plain(cast)
            && !cast.divides
            && cast.overflow == Overflow::Saturate
            && matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
            && rows * cols > 0
            && rows.is_multiple_of(16)
            && halves.is_multiple_of(16)
            && made.tensors().all(fits)
    }

    fn cast(
        &self,
        made: &Made<'_>,
        quant_scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
        measure: bool,
        sum_rows: Option<DType>,
    ) -> Result<MadeCast> {
        let gpu = Gpu::of(made.like())?;
        let (dtype, dims, (rows, cols)) = (made.dtype(), made.dims(), made.matrix());
        let codes = |wanted: bool| {
            wanted
                .then(|| gpu.alloc(DType::U8, rows * cols))
                .transpose()
        };
        let (row_major, transposed) = (
            codes(orientation.row_major())?,
            codes(orientation.transposed())?,
        );
        let amax = measure.then(|| zeroed_cell(&gpu)).transpose()?;
        let tiles = rows.div_ceil(TILE);
        let partial = sum_rows
            .map(|_| gpu.alloc(DType::F32, tiles * cols))
            .transpose()?;
        let statistics = match *made {
            Made::Norm {
                center,
                x,
                weight,
                eps,
                ..
            } => Some(
                Norm {
                    op: "norm",
                    center,
                    eps,
                }
                .statistics(x, weight)?,
            ),
            _ => None,
        };
        // The scale and the amax come last; without one, the scale stands in for it and its address is not passed on.
        let quant_scale = quant_scale.contiguous()?;
        let cell = amax.as_ref().unwrap_or(&quant_scale);
        let inputs = made.tensors().chain(&statistics);
        let inputs: Vec<_> = inputs.chain([&quant_scale, cell]).collect();
        with_pointer_list(&gpu, &inputs, |pointers| {
            let (values, [scale, cell]) = match pointers.split_last_chunk::<2>() {
                Some((values, last)) => (values, *last),
                None => crate::base::error::internal!("a cast without a scale"),
            };
            let (kernels, mut args) = source(made, values, cols);
            let ptr = |buffer: &Option<Buffer>| Arg::Ptr(buffer.as_ref().map_or(0, Buffer::ptr));
            args.extend([
                Arg::Ptr(scale),
                ptr(&row_major),
                ptr(&transposed),
                Arg::Ptr(if measure { cell } else { 0 }),
                ptr(&partial),
                Arg::Len(rows as u64),
                Arg::Len(cols as u64),
                Arg::Int((cast.format == Format::E5M2).into()),
            ]);
            let shape = Shape {
                resident: true,
                ..Shape::blocks(tiles * cols.div_ceil(TILE), THREADS)
            };
            // SAFETY: `supports` has checked shapes, dtypes and alignment; codes have rows * cols elements, the sums a row
            // for each row of tiles, and there is one scale.
            unsafe { launch(&gpu, kernels.of(OP, dtype)?, shape, &args) }
        })?;
        let sums = match (partial, sum_rows) {
            (Some(partial), Some(dtype)) => {
                Some(sum_partials(&gpu, &partial, (tiles, cols), dtype)?)
            }
            _ => None,
        };
        Ok(MadeCast {
            codes: Codes {
                row_major: row_major
                    .map(|codes| codes.into_tensor(dims.as_slice()))
                    .transpose()?,
                transposed: transposed
                    .map(|codes| codes.into_tensor((cols, rows)))
                    .transpose()?,
            },
            amax,
            sums,
        })
    }
}

/// The kernel of a source, and its first arguments from the addresses of its tensors.
fn source(made: &Made<'_>, pointers: &[u64], cols: usize) -> (FloatKernels, Vec<Arg>) {
    let at = |index: usize| Arg::Ptr(pointers.get(index).copied().unwrap_or(0));
    match *made {
        Made::Stored(_) => (STORED, vec![at(0)]),
        Made::Norm { bias, .. } => {
            let (bias, statistics) = match bias {
                Some(_) => (at(2), at(3)),
                None => (Arg::Ptr(0), at(2)),
            };
            (NORM, vec![at(0), at(1), bias, statistics])
        }
        Made::Activation { activation, .. } => {
            let x = pointers.first().copied().unwrap_or(0);
            let sides = Sides::halves(activation, x, cols, made.dtype());
            (ACTIVATION.of(activation), sides.args().to_vec())
        }
        Made::ActivationGradient { activation, .. } => {
            let x = pointers.first().copied().unwrap_or(0);
            let n = if activation.is_gated() {
                cols / 2
            } else {
                cols
            };
            let mut args = Sides::halves(activation, x, n, made.dtype())
                .args()
                .to_vec();
            args.extend([at(1), Arg::Len(n as u64)]);
            (GRADIENT.of(activation), args)
        }
    }
}
