//! Casts with the other roundings, or through f16. A chunk at a time: products first, then random bits, then codes.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{
    amax::Amax,
    convert::{f16_to_f32, f32_to_f16},
    dispatch,
};
use crate::{
    HighPrecision, Rounding, StochasticKey,
    cast::{Cast, Mode, Rounder, scaled_bits},
};

pub(super) const CHUNK: usize = 256;

/// The random words of a chunk, which may begin anywhere within a block of four.
pub(super) type Words = [u32; CHUNK + 4];

/// Casts segments of `len` elements, each with its scale; max |x| as bits where `AMAX`.
///
/// `element` is the index of the first element for stochastic rounding.
pub(crate) fn segments<T: HighPrecision, const AMAX: bool>(
    isa: super::Isa,
    cast: &Cast,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    element: u64,
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some((wide, random)) = wide_of(isa, cast, element) {
        return avx512::encode::segments::<T, AMAX>(
            isa,
            &wide,
            Some(random),
            src,
            len,
            quant_scales,
            dst,
        );
    }
    let mut max = Amax::default();
    let mut scales = [0.0; CHUNK];
    let mut start = 0;
    while start < src.len() {
        let end = src.len().min(start + CHUNK);
        let scales = &mut scales[..end - start];
        let mut filled = 0;
        while filled < scales.len() {
            let position = start + filled;
            let stop = scales.len().min(filled + len - position % len);
            scales[filled..stop].fill(quant_scales[position / len]);
            filled = stop;
        }
        let (src, dst) = (&src[start..end], &mut dst[start..end]);
        max.merge(columns::<T, AMAX>(
            isa,
            cast,
            src,
            scales,
            element + start as u64,
            dst,
        ));
        start = end;
    }
    max.bits()
}

/// Casts elements with a scale of their own each; max |x| as bits where `AMAX`.
///
/// `element` is the index of the first element for stochastic rounding.
pub(crate) fn columns<T: HighPrecision, const AMAX: bool>(
    isa: super::Isa,
    cast: &Cast,
    src: &[T],
    quant_scales: &[f32],
    element: u64,
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some((wide, random)) = wide_of(isa, cast, element) {
        return avx512::encode::columns::<T, AMAX>(
            isa,
            &wide,
            Some(random),
            src,
            quant_scales,
            dst,
        );
    }
    let rounder = Rounder::new(cast);
    let mut max = 0f32;
    let mut products = [0; CHUNK];
    let mut words = [0; CHUNK + 4];
    let chunks = src
        .chunks(CHUNK)
        .zip(quant_scales.chunks(CHUNK))
        .zip(dst.chunks_mut(CHUNK));
    for (index, ((src, quant_scales), dst)) in chunks.enumerate() {
        let products = &mut products[..src.len()];
        multiply(isa, src, quant_scales, products);
        if cast.via_f16 {
            round_through_f16(isa, products);
        }
        let element = element + (index * CHUNK) as u64;
        if let Rounding::Stochastic(key) = cast.rounding {
            random_words(isa, key, element / 4, &mut words);
        }
        encode_bits(
            isa,
            rounder,
            products,
            &words[(element % 4) as usize..],
            dst,
        );
        if AMAX {
            super::amax::segments(isa, src, src.len(), std::slice::from_mut(&mut max));
        }
    }
    max.to_bits()
}

/// The arguments of the stochastic AVX-512 kernel, where it has this cast.
#[cfg(target_arch = "x86_64")]
fn wide_of(
    isa: super::Isa,
    cast: &Cast,
    element: u64,
) -> Option<(avx512::round::Wide, avx512::encode::Random)> {
    match cast.rounding {
        Rounding::Stochastic(key) if avx512::is_in(isa) => {
            Some((avx512::round::Wide::new(cast)?, (key, element)))
        }
        _ => None,
    }
}

dispatch! {
    fn multiply [T: HighPrecision] [T] (src: &[T], quant_scales: &[f32], products: &mut [u32]) = multiply_body
}

dispatch! {
    fn round_through_f16(products: &mut [u32]) = round_through_f16_body
}

/// The words of the Philox blocks from `first` on.
pub(super) fn random_words(isa: super::Isa, key: StochasticKey, first: u64, words: &mut Words) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        avx512::philox::words_of(isa, key, first, words);
        return;
    }
    general_words(isa, key, first, words);
}

dispatch! {
    fn general_words(key: StochasticKey, first: u64, words: &mut Words) = random_words_body
}

dispatch! {
    fn encode_bits(rounder: Rounder, products: &[u32], words: &[u32], dst: &mut [u8]) = encode_bits_body
}

#[inline(always)]
fn multiply_body<T: HighPrecision>(src: &[T], quant_scales: &[f32], products: &mut [u32]) {
    for ((&x, &quant_scale), product) in src.iter().zip(quant_scales).zip(products) {
        *product = scaled_bits(x.to_f32(), quant_scale);
    }
}

#[inline(always)]
fn round_through_f16_body(products: &mut [u32]) {
    for product in products {
        *product = f16_to_f32(f32_to_f16(f32::from_bits(*product))).to_bits();
    }
}

#[inline(always)]
fn random_words_body(key: StochasticKey, first: u64, words: &mut Words) {
    for (index, words) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *words = key.block(first.wrapping_add(index as u64));
    }
}

#[inline(always)]
fn encode_bits_body(rounder: Rounder, products: &[u32], words: &[u32], dst: &mut [u8]) {
    // One loop per mode, in which the mode is a constant.
    macro_rules! with_mode {
        ($($mode:ident)+) => {
            match rounder.mode() {
                $(Mode::$mode => {
                    let rounder = rounder.with_mode(Mode::$mode);
                    for ((&bits, &word), dst) in products.iter().zip(words).zip(dst) {
                        *dst = rounder.code(bits, word);
                    }
                })+
            }
        };
    }
    with_mode!(NearestEven Stochastic TowardZero NearestAway TowardPositive TowardNegative)
}
