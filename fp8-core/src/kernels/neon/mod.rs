//! The hot kernels by hand for NEON: chunks of 32 elements, as eight vectors of f32.
//!
//! They have been run under an emulator only, and their speed is unmeasured.

pub(super) mod decode;
pub(super) mod encode;
pub(super) mod halves;

use std::arch::aarch64::*;

use super::{Isa, IsaLevel, LANES};
use crate::{
    HighPrecision,
    high_precision::sealed::{Kind, Sealed},
};

/// Elements of a vector of f32.
const WIDTH: usize = 4;
/// Vectors of f32 in a chunk.
const VECTORS: usize = LANES / WIDTH;

/// A chunk in f32.
type Block = [float32x4_t; VECTORS];

/// Whether the functions of this module may be called.
pub(super) fn is_in(isa: Isa) -> bool {
    isa.level() >= IsaLevel::Neon
}

/// A chunk in f32.
#[inline]
#[target_feature(enable = "neon")]
fn load<T: HighPrecision>(src: &[T; LANES]) -> Block {
    let mut block = [vdupq_n_f32(0.0); VECTORS];
    let words = |pair: usize| {
        // SAFETY: called for types of 16 bits and pairs of vectors within the chunk.
        unsafe { vld1q_u16(src.as_ptr().cast::<u16>().add(2 * WIDTH * pair)) }
    };
    match <T as Sealed>::KIND {
        Kind::F32 => {
            for (i, vector) in block.iter_mut().enumerate() {
                // SAFETY: `KIND` names the type itself, and a chunk is this many vectors.
                *vector = unsafe { vld1q_f32(src.as_ptr().cast::<f32>().add(WIDTH * i)) };
            }
        }
        Kind::Bf16 => {
            for (pair, vectors) in block.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *vectors = upper_halves(words(pair));
            }
        }
        Kind::F16 => {
            for (pair, vectors) in block.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let halves = vreinterpretq_f16_u16(words(pair));
                vectors[0] = vcvt_f32_f16(vget_low_f16(halves));
                vectors[1] = vcvt_high_f32_f16(halves);
            }
        }
        Kind::F64 => {
            let mut wide = [0.0; LANES];
            for i in 0..LANES {
                wide[i] = src[i].to_f32();
            }
            block = load(&wide);
        }
    }
    block
}

/// A chunk rounded to its type; a NaN may have any payload.
#[inline]
#[target_feature(enable = "neon")]
fn store<T: HighPrecision>(block: &Block, dst: &mut [T; LANES]) {
    match <T as Sealed>::KIND {
        Kind::F16 => {
            for (i, &vector) in block.iter().enumerate() {
                let halves = vreinterpret_u16_f16(vcvt_f16_f32(vector));
                // SAFETY: `KIND` names the type itself, and a chunk is this many vectors.
                unsafe { vst1_u16(dst.as_mut_ptr().cast::<u16>().add(WIDTH * i), halves) };
            }
        }
        Kind::F32 | Kind::Bf16 | Kind::F64 => {
            let wide = to_array(block);
            for i in 0..LANES {
                dst[i] = T::from_f32(wide[i]);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn to_array(block: &Block) -> [f32; LANES] {
    let mut wide = [0.0; LANES];
    for (dst, &vector) in wide.as_chunks_mut::<WIDTH>().0.iter_mut().zip(block) {
        // SAFETY: four elements.
        unsafe { vst1q_f32(dst.as_mut_ptr(), vector) };
    }
    wide
}

/// The numbers whose upper halves these are.
#[inline]
#[target_feature(enable = "neon")]
fn upper_halves(words: uint16x8_t) -> [float32x4_t; 2] {
    let zero = vdupq_n_u16(0);
    [
        vreinterpretq_f32_u16(vzip1q_u16(zero, words)),
        vreinterpretq_f32_u16(vzip2q_u16(zero, words)),
    ]
}

/// Up to a chunk of elements, and zeros after them.
#[inline]
fn padded<T: Copy + Default>(src: &[T]) -> [T; LANES] {
    let mut padded = [T::default(); LANES];
    padded[..src.len()].copy_from_slice(src);
    padded
}

/// The greatest magnitude, as bits.
#[inline]
#[target_feature(enable = "neon")]
fn greatest(block: &Block) -> u32 {
    let mut max = vdupq_n_u32(0);
    for &vector in block {
        max = vmaxq_u32(max, vreinterpretq_u32_f32(vabsq_f32(vector)));
    }
    vmaxvq_u32(max)
}

/// The bits of infinity; those of NaN are greater.
const INFINITY: u32 = f32::INFINITY.to_bits();
