//! Files of FP8 models: reads every family of checkpoints into one form, rewrites checkpoints layer by layer, and writes files
//! atomically.
//!
//! A checkpoint here is a model's files on disk. Recipes, layers and training state belong to `fp8-recipes`.
//!
//! | step | item |
//! |---|---|
//! | read a model | [`load::Checkpoint`], [`load::var_builder`], [`load::dequantize_into`] |
//! | rewrite one: quantize, convert, dequantize | [`rewrite`] |
//! | codes that keep the error of outputs small | [`search`] |
//! | how a layer is stored | [`scheme`], [`contents`] |
//! | check files that may be wrong | [`audit`] |
//! | write a file or several, all or nothing | [`atomic`] |
//! | open a file that may be hostile | [`read`], [`SafetensorsFile`] |
//! | JSON with Python's NaN and Infinity | [`python_json`] |
//! | names of layers and tensors | [`names`] |

#![doc(test(attr(deny(warnings))))]

pub mod adapter;
pub mod atomic;
pub mod audit;
mod check;
pub mod contents;
mod error;
pub mod load;
pub mod names;
pub mod python_json;
pub mod read;
pub mod rewrite;
mod safetensors_file;
pub mod scheme;
pub mod search;
mod spelling;

pub use check::first_outside;
pub use error::{Error, Result};
pub use load::static_weight::{refuse_codes, static_weight};
pub use safetensors_file::{FORMAT_KEY, SCALED_FORMAT, SafetensorsFile};
