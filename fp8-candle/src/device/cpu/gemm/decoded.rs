//! GEMM on decoded values, for processors without tiles and for scales that change within a tile: the products of
//! `device/cpu/dots`, scaled at the end.
//!
//! Every FP8 value and every bf16 is exact in f32, so decoding loses nothing. Each sum has one order, whatever the rows and
//! columns beside it.

use super::super::dots::{self, Rows, Sizes};
use super::epilogue::Epilogue;
use super::layout::unpack_codes;
use super::scales::Scales;
use super::side::{Elements, Side};
use crate::base::parallel::shared::Shared;
use fp8_core::{Contraction, HighPrecision, Isa};
use half::bf16;
use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Whether to scale while decoding: scales that vary along the sum cannot wait for the epilogue. Then neither can those of the
/// other operand: products of values and codes can leave the range of f32 although those of values do not.
fn scale_in_decode(a: &Side<'_>, b: &Side<'_>) -> bool {
    a.segment().is_some() || b.segment().is_some()
}

/// `[a.kept, b.kept]` into `out`; every element is written.
pub(super) fn gemm<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) {
    let (m, n, k) = (a.kept(), b.kept(), a.contracted());
    assert_eq!(out.len(), m * n);
    let scaled = scale_in_decode(a, b);
    let [rows, cols] = [a, b].map(|side| match scaled {
        true => Scales::NONE,
        false => Scales::of(side),
    });
    let epilogue = Epilogue::new(rows, cols, bias);
    let (a_stored, b_stored) = (row_major(a), row_major(b));
    let out = Shared::new(out);
    dots::product(
        isa,
        Sizes { m, n, k },
        decoded(a, &a_stored, scaled),
        (decoded(b, &b_stored, scaled), None::<&[f32]>),
        |row, col, sums| {
            let first = row * n + col;
            // SAFETY: each element is finished once.
            let out = unsafe { out.part(first..first + sums.len()) };
            epilogue.finish_row(row, col, sums, out);
        },
    );
}

/// Elements in the order of the grid.
enum Stored<'a> {
    Codes(Cow<'a, [u8]>),
    Bf16(&'a [bf16]),
}

fn row_major<'a>(side: &Side<'a>) -> Stored<'a> {
    match side.elements {
        Elements::Codes(codes) => Stored::Codes(codes.into()),
        Elements::Panels(order, codes) => {
            Stored::Codes(unpack_codes(order, codes, side.kept(), side.contracted()).into())
        }
        Elements::Bf16(values) => Stored::Bf16(values),
    }
}

/// The values of kept indices, each over the whole sum.
fn decoded<'a>(side: &'a Side<'_>, stored: &'a Stored<'_>, scaled: bool) -> impl Rows<f32> + 'a {
    let (kept, contracted) = (side.kept(), side.contracted());
    let values: [f32; 256] = std::array::from_fn(|code| side.format.decode(code as u8));
    move |rows: Range<usize>, stride: usize, dst: &mut [f32]| {
        let codes = match stored {
            Stored::Codes(codes) => codes,
            Stored::Bf16(stored) => return widened(side, stored, rows, stride, dst),
        };
        match side.contraction {
            Contraction::Cols => {
                for (row, dst) in rows.zip(dst.chunks_mut(stride)) {
                    let codes = &codes[row * contracted..][..contracted];
                    let (format, dst) = (side.format, &mut dst[..contracted]);
                    if scaled {
                        let (grid, scales) = (&side.grid, side.dequant_scales);
                        fp8_core::decode_rows(format, codes, row, grid, scales, dst);
                    } else {
                        fp8_core::decode(format, codes, 1., dst);
                    }
                }
            }
            Contraction::Rows => {
                let mut scales = vec![1.; rows.len()];
                for l in 0..contracted {
                    if scaled {
                        side.scales_into(rows.start, l, &mut scales);
                    }
                    let codes = &codes[l * kept..][rows.clone()];
                    for (i, (&code, scale)) in codes.iter().zip(&scales).enumerate() {
                        dst[i * stride + l] = values[usize::from(code)] * scale;
                    }
                }
            }
        }
    }
}

/// The values of kept indices of an operand in bf16, which has no scales.
fn widened(side: &Side<'_>, values: &[bf16], rows: Range<usize>, stride: usize, dst: &mut [f32]) {
    let (kept, contracted) = (side.kept(), side.contracted());
    match side.contraction {
        Contraction::Cols => {
            for (row, dst) in rows.zip(dst.chunks_mut(stride)) {
                let values = &values[row * contracted..][..contracted];
                fp8_core::widen(values, &mut dst[..contracted]);
            }
        }
        Contraction::Rows => {
            for l in 0..contracted {
                for (i, value) in values[l * kept..][rows.clone()].iter().enumerate() {
                    dst[i * stride + l] = value.to_f32();
                }
            }
        }
    }
}
