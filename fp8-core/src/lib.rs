//! 8-bit floating point formats, casts and scaling maths for training: no tensors, no threads, no I/O.
//!
//! - [`Format`] and the newtypes [`E4M3`], [`E5M2`], [`E4M3Fnuz`], [`E5M2Fnuz`], [`E8M0`], [`E2M1`] say what a code means.
//! - [`Cast::encode`] defines the cast from f32; [`encode`], [`decode`] and [`amax`] do the same over slices.
//! - [`ScaleGrid`] says which scale belongs to which element; [`encode_rows`], [`decode_rows`] and [`amax_rows`] work
//!   under it on runs of rows, so that any split of a matrix over threads gives the same bits;
//!   [`encode_rows_transposed`] gives the codes in both orientations.
//! - [`scaled`]: scales and their rules where every tensor is a pair of data and scale.
//! - [`encode_expanded`] and [`decode_expanded`]: blocks whose curves fill the range of E4M3.
//! - [`dynamic_quant_scale`] and its like make a scale from an amax (max |x|), [`update_slot`] one from a history.
//!
//! A `quant_scale` multiplies a value before the cast, a `dequant_scale` after it; one is the [`reciprocal`] of the
//! other (casts for served models divide by the `dequant_scale` instead, see [`Cast::divides`]):
//!
//! ```
//! use fp8_core::{Cast, Format, amax, decode, dynamic_quant_scale, encode, reciprocal};
//!
//! let weights = [0.25f32, -1.5, 0.125, 3.0];
//! let quant_scale = dynamic_quant_scale(amax(&weights), Format::E4M3);
//! let mut codes = [0u8; 4];
//! encode(&Cast::new(Format::E4M3), &weights, quant_scale, &mut codes);
//! assert_eq!(codes[3], 0x7E); // the largest weight becomes the largest E4M3 value
//!
//! let mut back = [0f32; 4];
//! decode(Format::E4M3, &codes, reciprocal(quant_scale), &mut back);
//! assert!(weights.iter().zip(back).all(|(w, b)| (w - b).abs() <= w.abs() / 16.0));
//! ```
//!
//! # Instruction sets
//!
//! On x86-64 the slice functions pick AVX-512, AVX2 or portable code when first called, on aarch64 NEON, see [`Isa`]. The
//! environment variable `FP8_ISA` (`portable`, `avx2`, `avx512`, `avx512bf16` or `amx`; `portable` or `neon`), read once,
//! chooses a lower level; an unknown or unavailable one is an error, see [`Isa::from_env`]. The results of this crate are the same to the bit on every
//! level, except that of a decoded NaN only the sign is promised; those of the GEMMs built on it differ in the order of their sums.

#![doc(test(attr(deny(warnings))))]

mod cast;
mod e2m1;
mod e8m0;
mod element;
mod error;
mod expanded;
mod expansion;
mod format;
mod granularity;
mod groups;
mod half_rounding;
mod high_precision;
mod history;
mod history_order;
mod kernels;
mod philox;
mod rows;
pub mod scaled;
mod scaling;
mod setters;
mod slice;
mod types;

pub use cast::{Cast, Overflow, Rounding, StochasticKey};
pub use e2m1::{E2M1, unpack_e2m1};
pub use e8m0::E8M0;
pub use error::{GridError, ParseFormatError, ParseNameError, ScaleError, did_you_mean};
pub use expanded::{decode_expanded, encode_expanded};
pub use expansion::{EXPANDED_BLOCK, EXPANDED_CURVES, EXPANDED_WORDS, Expansion, RandomWords};
pub use format::{Format, FormatPair};
pub use granularity::{Contraction, Granularity, MX_BLOCK, ScaleGrid};
pub use groups::encode_groups;
pub use half_rounding::HalfPrecision;
pub use high_precision::HighPrecision;
pub use history::{
    AmaxCompute, CustomAmax, DelayedRule, MAX_HISTORY_LEN, ScaleRounding, SlotUpdate, remake_scale,
    resize_history, update_slot,
};
pub use history_order::HistoryOrder;
pub use kernels::{Isa, IsaError, IsaLevel, Levels, prefetch, prefetch_line};
pub use philox::philox4x32_10;
pub use rows::{
    amax_rows, decode_rows, encode_rows, encode_rows_transposed, encode_rows_with_amax,
};
pub use scaling::{
    AMAX_EPSILON, current_quant_scale, delayed_quant_scale, dynamic_quant_scale,
    floor_to_power_of_two, inference_dequant_scale, inference_quant_scale, mx_dequant_scale_floor,
    mx_dequant_scale_rceil, reciprocal, static_dequant_scale,
};
pub use slice::{
    amax, decode, encode, encode_with_amax, narrow, random_words, stochastic_round, widen,
};
pub use types::{E4M3, E4M3Fnuz, E5M2, E5M2Fnuz};
