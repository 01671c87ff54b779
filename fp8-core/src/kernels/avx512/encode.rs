//! Nearest-even and stochastic casts.

use std::arch::x86_64::*;

use super::{
    BLOCK, Block, VECTORS, exact, load_block,
    philox::Generator,
    prefetch,
    round::{Rounder, Wide, any_nan},
    scales::VectorScales,
    store_bytes,
};
use crate::{
    HighPrecision, StochasticKey,
    high_precision::sealed::Kind,
    kernels::{Isa, Layout},
};

/// The random bits of stochastic rounding: their key, and the index of the first element.
pub(crate) type Random = (StochasticKey, u64);

/// Casts elements with their scales; max |x| as bits where `AMAX`. Stochastic with `random`, else to nearest even.
pub(crate) fn run<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    wide: &Wide,
    random: Option<Random>,
    src: &[T],
    layout: Layout,
    scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    assert!(super::is_in(isa));
    let (key, stochastic) = (random.unwrap_or_default(), random.is_some());
    if let Layout::Segments(len) = layout
        && !stochastic
        && !AMAX
        && T::KIND == Kind::Bf16
        && wide.saturates_to_e4m3()
        && len >= BLOCK
        && exact::encodes(scales)
    {
        // SAFETY: an `Isa` of this level exists only where these four features were found.
        unsafe {
            exact::encode(src, len, scales, dst, |src, scale, dst| {
                segments_of::<T, false, false>(wide, key, src, src.len(), &[scale], dst);
            });
        }
        return 0;
    }
    // SAFETY: an `Isa` of this level exists only where these four features were found.
    unsafe {
        match (layout, stochastic) {
            (Layout::Segments(len), false) => {
                segments_of::<T, AMAX, false>(wide, key, src, len, scales, dst)
            }
            (Layout::Segments(len), true) => {
                segments_of::<T, AMAX, true>(wide, key, src, len, scales, dst)
            }
            (Layout::PerElement, false) => {
                columns_of::<T, AMAX, false>(wide, key, src, scales, dst)
            }
            (Layout::PerElement, true) => columns_of::<T, AMAX, true>(wide, key, src, scales, dst),
        }
    }
}

/// A cast in progress over a slice.
struct Encoder<const AMAX: bool, const STOCHASTIC: bool> {
    rounder: Rounder,
    generator: Generator,
    /// The next element.
    element: u64,
    /// The largest magnitude of the blocks with NaN products, as bits; the vectors do not handle NaN.
    nan_max: u32,
}

impl<const AMAX: bool, const STOCHASTIC: bool> Encoder<AMAX, STOCHASTIC> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn new(wide: &Wide, (key, element): Random) -> Self {
        Self {
            rounder: Rounder::new(wide),
            generator: if STOCHASTIC {
                Generator::new(key)
            } else {
                Generator::default()
            },
            element,
            nan_max: 0,
        }
    }

    /// Casts up to a block of elements; returns `max` with their magnitudes merged.
    ///
    /// Arguments passed by value stay in registers. Each caller passes another `CALLER`: a function of this length is only
    /// sure to be inlined if it has one caller.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn encode<T: HighPrecision, const CALLER: u8>(
        &mut self,
        mut max: Block,
        src: &[T],
        scales: Block,
        dst: &mut [u8],
    ) -> Block {
        prefetch(src);
        let values = load_block(src);
        let mut products = values;
        for v in 0..VECTORS {
            products[v] = _mm512_mul_ps(values[v], scales[v]);
            if AMAX {
                max[v] = _mm512_range_ps::<MAX_MAGNITUDE>(max[v], values[v]);
            }
        }
        let random = if STOCHASTIC {
            self.generator.block(self.element)
        } else {
            [_mm512_setzero_si512(); VECTORS]
        };
        self.element = self.element.wrapping_add(src.len() as u64);
        let mut codes = self.rounder.codes::<STOCHASTIC>(products, random);
        if any_nan(products) {
            codes = self.rounder.with_nan(codes, products, signs(src));
            if AMAX {
                self.nan_max = self.nan_max.max(max_of(src));
            }
        }
        store_bytes(dst, codes);
        max
    }

    /// [`Encoder::encode`], outside the loop.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn encode_rest<T: HighPrecision>(
        &mut self,
        max: Block,
        src: &[T],
        scales: Block,
        dst: &mut [u8],
    ) -> Block {
        self.encode::<T, 0>(max, src, scales, dst)
    }

    /// The bits of max |x|.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn max_bits(self, [a, b, c, d]: Block) -> u32 {
        let max = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
        if f32::from_bits(self.nan_max).is_nan() {
            return self.nan_max;
        }
        _mm512_reduce_max_epu32(_mm512_castps_si512(max)).max(self.nan_max)
    }
}

/// The sign bits of the values of a block, from memory: converting a NaN does not define its sign.
#[cold]
#[inline(never)]
fn signs<T: HighPrecision>(src: &[T]) -> u64 {
    let bits = src.iter().rev().map(|x| u64::from(x.sign_bit()));
    bits.fold(0, |signs, bit| signs << 1 | bit)
}

/// The bits of max |x|.
#[cold]
#[inline(never)]
fn max_of<T: HighPrecision>(src: &[T]) -> u32 {
    let max = src.iter().map(|x| x.magnitude()).max();
    T::magnitude_bits(max.unwrap_or_default())
}

/// For `_mm512_range_ps`: the larger magnitude, without its sign. A quiet NaN loses to the other operand, a signaling one becomes quiet.
const MAX_MAGNITUDE: i32 = 0b1011;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn segments_of<T: HighPrecision, const AMAX: bool, const STOCHASTIC: bool>(
    wide: &Wide,
    random: Random,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut encoder = Encoder::<AMAX, STOCHASTIC>::new(wide, random);
    let mut max = [_mm512_setzero_ps(); VECTORS];
    if VectorScales::are_for(len) {
        let mut scales = VectorScales::new(quant_scales, len);
        let (src_blocks, src_rest) = src.as_chunks::<BLOCK>();
        let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
        for (src, dst) in src_blocks.iter().zip(dst_blocks) {
            max = encoder.encode::<T, 1>(max, src, scales.next(), dst);
        }
        if !src_rest.is_empty() {
            max = encoder.encode_rest(max, src_rest, scales.next(), dst_rest);
        }
    } else {
        for ((src, dst), &scale) in src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales) {
            let scales = [_mm512_set1_ps(scale); VECTORS];
            // First up to the next counter of the generator: from there on its words need no shifts.
            let head = if STOCHASTIC {
                src.len().min((encoder.element.wrapping_neg() % 4) as usize)
            } else {
                0
            };
            let ((src_head, src), (dst_head, dst)) = (src.split_at(head), dst.split_at_mut(head));
            if head > 0 {
                max = encoder.encode_rest(max, src_head, scales, dst_head);
            }
            let (src_blocks, src_rest) = src.as_chunks::<BLOCK>();
            let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
            for (src, dst) in src_blocks.iter().zip(dst_blocks) {
                max = encoder.encode::<T, 2>(max, src, scales, dst);
            }
            if !src_rest.is_empty() {
                max = encoder.encode_rest(max, src_rest, scales, dst_rest);
            }
        }
    }
    encoder.max_bits(max)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn columns_of<T: HighPrecision, const AMAX: bool, const STOCHASTIC: bool>(
    wide: &Wide,
    random: Random,
    src: &[T],
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut encoder = Encoder::<AMAX, STOCHASTIC>::new(wide, random);
    let mut max = [_mm512_setzero_ps(); VECTORS];
    let (src_blocks, src_rest) = src.as_chunks::<BLOCK>();
    let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
    let (scale_blocks, scale_rest) = quant_scales.as_chunks::<BLOCK>();
    for ((src, scales), dst) in src_blocks.iter().zip(scale_blocks).zip(dst_blocks) {
        max = encoder.encode::<T, 3>(max, src, load_block(scales), dst);
    }
    if !src_rest.is_empty() {
        max = encoder.encode_rest(max, src_rest, load_block(scale_rest), dst_rest);
    }
    encoder.max_bits(max)
}
