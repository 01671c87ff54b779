// Here README's links lead to pages of the guide: rustdoc takes the first of two definitions of a link.
//! [benchmarks]: guide::benchmarks
//! [calibration]: guide::calibration
//! [checkpoints]: guide::checkpoints
//! [choosing]: guide::choosing
//! [coming from]: guide::coming_from
//! [emulation]: guide::emulation
//! [fine-tuning]: guide::fine_tuning
//! [GPUs]: guide::gpus
//! [models]: guide::models
//! [scaled arithmetic]: guide::scaled
//! [several ranks]: guide::distributed
//! [Start]: guide::start
//! [statistics]: guide::statistics
//! [steps]: guide::steps
//! [tour]: guide::tour
//!
#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! **[`guide`]** explains the library by task; begin with [`guide::start`]. The root of this crate re-exports all of [`fp8_recipes`]:
//!
//! | you want | items |
//! |---|---|
//! | a model that can run in FP8 | [`nn`], [`with_tracing`], [`macro@Fp8Module`], [`prepare_fp8`], [`PrepareOptions`], [`LayerFilter`] |
//! | to compute in FP8 | [`fp8_autocast`], [`with_fp8`], [`end_step`], [`Autocast`], [`AutocastHandle`] |
//! | to choose how | [`Recipe`], [`RecipeName`], [`Fp8LinearConfig`], [`DelayedScaling`], [`config`] |
//! | to train | [`optim`], [`GradAccumulator`], [`check_gradients`], [`checkpoint`] |
//! | to see what casts do | [`CastStats`], [`StepSummary`] |
//! | to write an FP8 file | [`save_calibrated`], [`save_calibrated_with`], [`ExportOptions`], [`Ragged`] |
//! | to read one | [`load::var_builder`], [`load::dequantize_into`] |
//! | to run FP8 files of a Llama, a mixture of experts or a BERT | [`models`] |
//! | to serve a language model to many callers at once | [`serving`] |
//! | to train on text, chats or labelled texts | [`training`] |
//! | to handle errors | [`Error`], which wraps an enum for each area: [`GuardError`], [`LayerError`], [`ExportError`], .. |
//! | several processes that train one model | [`ranks`] |
//! | to keep freed memory for the next step | [`keep_freed_memory`] |
//! | formats, casts of slices and the maths of scales, without candle | [`fp8_core`] |
//! | FP8 tensors, casts, products and differentiable operations | [`fp8_candle`]; by hand: [`guide::low_level`] |

#![doc(test(attr(deny(warnings))))]

pub mod guide;
mod memory;
pub mod models;
pub mod serving;
pub mod training;

pub use fp8_candle;
pub use fp8_core;
// The derive macro of the trait of this name; the code that it generates refers to this crate.
pub use fp8_derive::Fp8ModuleOfFacade as Fp8Module;
pub use fp8_files;
pub use fp8_ranks as ranks;
pub use fp8_recipes;
pub use fp8_recipes::*;
pub use fp8_scaled;
pub use memory::{MemoryInUse, keep_freed_memory, memory_in_use};

/// Scaled arithmetic: tensors and operations of [`fp8_scaled`], parameters and files of [`fp8_recipes::scaled`].
///
/// ```
/// use candle_core::{DType, Device};
/// use fp8::scaled::{Scaled, ScaledVarMap};
/// let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
/// let three = Scaled::constant(3.0, params.dtype(), params.device())?;
/// assert_eq!(three.scale().to_f32(), 2.0);
/// # Ok::<(), fp8::Error>(())
/// ```
pub mod scaled {
    pub use fp8_recipes::scaled::*;
    pub use fp8_scaled::*;
}
