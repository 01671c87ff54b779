//! Casts with other roundings than nearest-even, or through f16: for each chunk products, then random bits, then codes.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{
    Layout,
    convert::{f16_to_f32, f32_to_f16},
    dispatch,
};
use crate::{
    HighPrecision, Rounding, StochasticKey,
    cast::{Cast, Mode, Rounder, scaled_bits},
};

pub(crate) const CHUNK: usize = 256;

/// Room for the random words of a chunk, which may begin anywhere within a block of four.
pub(crate) type Words = [u32; CHUNK + 4];

/// Casts elements with their scales; max |x| as bits where `AMAX`.
///
/// `element` is the index of the first element for stochastic rounding.
pub(crate) fn encode<T: HighPrecision, const AMAX: bool>(
    isa: super::Isa,
    cast: &Cast,
    src: &[T],
    layout: Layout,
    quant_scales: &[f32],
    element: u64,
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some((wide, random)) = wide_of(isa, cast, element) {
        let random = Some(random);
        return avx512::encode::run::<T, AMAX>(isa, &wide, random, src, layout, quant_scales, dst);
    }
    let (rounder, mut max) = (Rounder::new(cast), 0f32);
    let (mut scales, mut products) = ([0.0; CHUNK], [0; CHUNK]);
    let mut words = [0; CHUNK + 4];
    for (index, (src, dst)) in src.chunks(CHUNK).zip(dst.chunks_mut(CHUNK)).enumerate() {
        let start = index * CHUNK;
        let scales = match layout {
            Layout::PerElement => &quant_scales[start..start + src.len()],
            Layout::Segments(len) => {
                let scales = &mut scales[..src.len()];
                spread(quant_scales, len, start, scales);
                scales
            }
        };
        let products = &mut products[..src.len()];
        multiply(isa, src, scales, products);
        if cast.via_f16 {
            round_through_f16(isa, products);
        }
        let element = element + start as u64;
        if let Rounding::Stochastic(key) = cast.rounding {
            let drawn = &mut words[..(element % 4) as usize + src.len()];
            random_words(isa, key, element / 4, drawn);
        }
        let words = &words[(element % 4) as usize..];
        encode_bits(isa, rounder, products, words, dst);
        if AMAX {
            let whole = Layout::Segments(src.len());
            super::amax::merge(isa, src, whole, std::slice::from_mut(&mut max));
        }
    }
    max.to_bits()
}

/// The scale of each element from `start` on, where every `len` elements share one.
fn spread(quant_scales: &[f32], len: usize, start: usize, scales: &mut [f32]) {
    let mut filled = 0;
    while filled < scales.len() {
        let position = start + filled;
        let stop = scales.len().min(filled + len - position % len);
        scales[filled..stop].fill(quant_scales[position / len]);
        filled = stop;
    }
}

/// The arguments of the stochastic AVX-512 kernel, if it has this cast.
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
    fn multiply [T: HighPrecision] [T] (src: &[T], quant_scales: &[f32], products: &mut [u32]) {
        for ((&x, &quant_scale), product) in src.iter().zip(quant_scales).zip(products) {
            *product = scaled_bits(x.to_f32(), quant_scale);
        }
    }
}

dispatch! {
    fn round_through_f16(products: &mut [u32]) {
        for product in products {
            *product = f16_to_f32(f32_to_f16(f32::from_bits(*product))).to_bits();
        }
    }
}

/// The words of the Philox blocks from `first` on, of which the last may be cut off.
pub(crate) fn random_words(isa: super::Isa, key: StochasticKey, first: u64, words: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        avx512::philox::words_of(isa, key, first, words);
        return;
    }
    general_words(isa, key, first, words);
}

dispatch! {
    fn general_words(key: StochasticKey, first: u64, words: &mut [u32]) {
        // Blocks that are made together. Loops over fewer of them would be unrolled by the compiler instead of vectorized.
        const AT_ONCE: usize = 16;
        let (many, rest) = words.as_chunks_mut::<{ 4 * AT_ONCE }>();
        let left = first.wrapping_add((many.len() * AT_ONCE) as u64);
        for (index, words) in many.iter_mut().enumerate() {
            let blocks = key.blocks::<AT_ONCE>(first.wrapping_add((index * AT_ONCE) as u64));
            words.copy_from_slice(blocks.as_flattened());
        }
        for (index, words) in rest.chunks_mut(4).enumerate() {
            let block = key.block(left.wrapping_add(index as u64));
            words.copy_from_slice(&block[..words.len()]);
        }
    }
}

dispatch! {
    fn encode_bits(rounder: Rounder, products: &[u32], words: &[u32], dst: &mut [u8]) {
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
}
