//! Results written straight from the registers of a tile: scaled, rounded, with the bias.

#[cfg(target_arch = "x86_64")]
use super::layout::PANEL;
#[cfg(target_arch = "x86_64")]
use super::prefetch;
use super::scales::Scales;
use crate::base::parallel::shared::Shared;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

/// The results of a product, in a dtype that tiles write.
#[derive(Clone, Copy)]
pub(super) enum Out<'a> {
    F32(Shared<'a, MaybeUninit<f32>>),
    Bf16(Shared<'a, MaybeUninit<bf16>>),
}

/// The results of a product, and how sums become results; no row scale is extreme.
#[derive(Clone, Copy)]
pub(super) struct Results<'a> {
    pub(super) out: Out<'a>,
    pub(super) cols: usize,
    pub(super) row_scales: &'a Scales,
    pub(super) col_scales: &'a Scales,
    pub(super) bias: Option<&'a [f32]>,
}

/// The part of the results from a row and a column on, which belongs to one task.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    results: &'a Results<'a>,
    row: usize,
    col: usize,
}

/// The first `len` of 32 lanes, in two vectors.
#[cfg(target_arch = "x86_64")]
fn masks(len: usize) -> [__mmask16; 2] {
    let mask = match len {
        PANEL.. => u32::MAX,
        len => (1 << len) - 1,
    };
    [mask as u16, (mask >> 16) as u16]
}

impl<'a> Results<'a> {
    /// # Safety
    /// Only one task at a time may write to the rows and columns that it writes through its block.
    pub(super) unsafe fn block(&'a self, row: usize, col: usize) -> Block<'a> {
        Block {
            results: self,
            row,
            col,
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> Block<'a> {
    /// The block `rows` rows below and `cols` columns after this one.
    pub(super) fn at(self, rows: usize, cols: usize) -> Self {
        Self {
            row: self.row + rows,
            col: self.col + cols,
            ..self
        }
    }

    fn len(&self) -> usize {
        PANEL.min(self.results.cols - self.col)
    }

    /// Where row `row` of the block begins among the results.
    fn start(&self, row: usize) -> usize {
        (self.row + row) * self.results.cols + self.col
    }

    /// Prefetches the cache lines of these rows for writing.
    #[inline]
    pub(super) fn prefetch(&self, rows: Range<usize>) {
        let (start, size) = match self.results.out {
            Out::F32(out) => (out.address().cast::<i8>(), size_of::<f32>()),
            Out::Bf16(out) => (out.address().cast::<i8>(), size_of::<bf16>()),
        };
        for row in rows {
            let row = start.wrapping_add(self.start(row) * size);
            for line in (0..=PANEL * size).step_by(64) {
                prefetch::to_write(row.wrapping_add(line));
            }
        }
    }

    /// Writes `R` rows of up to 32 columns; for the other parameters see `tile_bf16.rs`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
    pub(super) fn write<
        const R: usize,
        const P: usize,
        const PACKED: bool,
        const PAIRS: bool,
        const SCALED: bool,
    >(
        self,
        tile: [[__m512; 2]; R],
    ) {
        let len = self.len();
        let masks = masks(len);
        let cols = self.col..self.col + len;
        let load = |values: &[f32]| {
            // SAFETY: a masked load reads no element outside of its mask, which has none past the end of `values`: both
            // are of `len`.
            unsafe {
                [
                    _mm512_maskz_loadu_ps(masks[0], values.as_ptr()),
                    _mm512_maskz_loadu_ps(masks[1], values.as_ptr().wrapping_add(16)),
                ]
            }
        };
        let col_scales = match self.results.col_scales {
            Scales::One(scale) => [_mm512_set1_ps(*scale); 2],
            Scales::Each(scales) => load(&scales[cols.clone()]),
        };
        let bias = self.results.bias.map(|bias| load(&bias[cols]));
        for (row, tile) in tile.into_iter().enumerate() {
            let row_scale = _mm512_set1_ps(match self.results.row_scales {
                Scales::One(scale) => *scale,
                Scales::Each(scales) => scales[self.row + row],
            });
            let mut values = [tile[0], tile[1]];
            for half in 0..2 {
                let scaled = _mm512_mul_ps(values[half], row_scale);
                values[half] = _mm512_mul_ps(scaled, col_scales[half]);
            }
            let place = self.start(row)..self.start(row) + len;
            match self.results.out {
                Out::F32(out) => {
                    if let Some(bias) = bias {
                        values = [
                            _mm512_add_ps(values[0], bias[0]),
                            _mm512_add_ps(values[1], bias[1]),
                        ];
                    }
                    // SAFETY: the caller of `Results::block` guarantees that no other task uses these elements.
                    let out = unsafe { out.part(place) }.as_mut_ptr().cast::<f32>();
                    // SAFETY: a masked store writes no element outside of its mask, which has `len`.
                    unsafe {
                        _mm512_mask_storeu_ps(out, masks[0], values[0]);
                        _mm512_mask_storeu_ps(out.wrapping_add(16), masks[1], values[1]);
                    }
                }
                Out::Bf16(out) => {
                    let mut bits = [rounded(values[0]), rounded(values[1])];
                    if let Some(bias) = bias {
                        for half in 0..2 {
                            let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits[half]));
                            bits[half] = rounded(_mm512_add_ps(wide, bias[half]));
                        }
                    }
                    // SAFETY: the caller of `Results::block` guarantees that no other task uses these elements.
                    let out = unsafe { out.part(place) }.as_mut_ptr().cast::<i16>();
                    let [left, right] = [
                        _mm512_cvtepi32_epi16(bits[0]),
                        _mm512_cvtepi32_epi16(bits[1]),
                    ];
                    // SAFETY: a masked store writes no element outside of its mask, which has `len`.
                    unsafe {
                        _mm256_mask_storeu_epi16(out, masks[0], left);
                        _mm256_mask_storeu_epi16(out.wrapping_add(16), masks[1], right);
                    }
                }
            }
        }
    }
}

/// The bits of the nearest bf16. The instruction for this would flush subnormals to zero.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn rounded(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let below_half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    let nan = _mm512_cmpunord_ps_mask(values, values);
    let sum = _mm512_add_epi32(below_half, odd);
    let sum = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_srli_epi32::<16>(sum)
}
