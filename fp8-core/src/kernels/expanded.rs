//! Blocks with dynamic range expansion, as `expansion.rs` defines them.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::dispatch;
use crate::expansion::{
    Curve, EXPANDED_BLOCK, EXPANDED_WORDS, Expansion, Outs, RandomWords, decode_block, encode_block,
};

pub(crate) fn encode(
    isa: super::Isa,
    values: &[f32],
    expansion: Expansion,
    words: Option<RandomWords<'_>>,
    outs: Outs<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        return avx512::expanded::encode(isa, values, expansion, words, outs);
    }
    general_encode(isa, values, expansion, words, outs);
}

pub(crate) fn decode(
    isa: super::Isa,
    codes: &[u8],
    amaxes: &[f32],
    curves: &[u8],
    values: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_vbmi() {
        return avx512::expanded::decode(isa, codes, amaxes, curves, values);
    }
    general_decode(isa, codes, amaxes, curves, values);
}

dispatch! {
    pub(super) fn general_encode(
        values: &[f32],
        expansion: Expansion,
        words: Option<RandomWords<'_>>,
        outs: Outs<'_>,
    ) {
        let (codes, amaxes, curves) = outs;
        let blocks = values.chunks(EXPANDED_BLOCK).zip(codes.chunks_mut(EXPANDED_BLOCK));
        let marks = amaxes.iter_mut().zip(curves);
        for (block, ((values, codes), (amax, curve))) in blocks.zip(marks).enumerate() {
            let own = words.map(|random| RandomWords {
                words: &random.words[block * EXPANDED_WORDS..],
                ..random
            });
            let (largest, on) = encode_block(values, expansion, own, codes);
            (*amax, *curve) = (largest, on as u8);
        }
    }
}

dispatch! {
    pub(super) fn general_decode(
        codes: &[u8],
        amaxes: &[f32],
        curves: &[u8],
        values: &mut [f32],
    ) {
        let blocks = values.chunks_mut(EXPANDED_BLOCK).zip(codes.chunks(EXPANDED_BLOCK));
        for ((values, codes), (amax, curve)) in blocks.zip(amaxes.iter().zip(curves)) {
            decode_block(codes, *amax, Curve::of(*curve), values);
        }
    }
}
