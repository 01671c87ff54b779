//! FP8 recipes for candle: a guard around the forward pass, layers that obey it, and everything around training and
//! serving with them.
//!
//! | step | item |
//! |---|---|
//! | build the model with drop-in layers | [`nn`] |
//! | give FP8 state to its linear layers | [`prepare_fp8`] |
//! | leave out those that are no faster | [`PrepareOptions::auto`], [`timings`] |
//! | compute in FP8 | [`fp8_autocast`] |
//! | choose how | [`config::Recipe`] |
//! | find cut gradients | [`check_gradients`] |
//! | take a step from several micro-batches | [`GradAccumulator`] |
//! | optimize, save, resume | [`optim`], [`checkpoint`], all in one value: [`TrainState`] |
//! | train without loss scaling and f32 weights | [`scaled`] |
//! | quantize a trained model | [`quantize_model`] |
//! | export for inference | [`save_calibrated`] after a calibrating guard |
//! | load FP8 checkpoints | [`load::var_builder`] |
//! | rewrite checkpoints: quantize, convert, dequantize | [`rewrite`] |
//! | open a path that may not be a regular file | [`read`] |

#![doc(test(attr(deny(warnings))))]

#[macro_use]
mod macros;

mod array;
mod autocast;
pub mod checkpoint;
pub mod config;
pub mod emulation;
mod error;
mod export;
mod module;
pub mod nn;
mod prepare;
pub mod rewrite;
pub mod scaled;
mod stats;
pub mod timings;
mod train_state;
mod warning;
pub mod with_tracing;

pub use autocast::{
    Autocast, AutocastGuard, AutocastHandle, Calibration, Fp8State, NonFinite, ReductionGroup,
    SingleProcess, StepSummary, end_step, fp8_autocast, is_fp8_enabled, is_guard_open,
    is_recomputing, with_fp8,
};
pub use config::{
    AmaxCompute, AttentionProducts, CastConfig, CastRounding, CustomAmax, DelayedFormat,
    DelayedScaling, Format, FormatPair, Fp8LinearConfig, GemmConfig, Granularity, InitialScale,
    KeptActivations, LayerFilter, Operand, Overflow, Recipe, RecipeName, ScaleRounding,
    ScalingType,
};
pub use error::{
    DenseError, Error, ExportError, GuardError, LayerError, Result, TrainingCheckpointError,
};
pub use export::{
    ExportOptions, ExportReport, PtqScheme, QuantizedModel, Ragged, quantize_model,
    save_calibrated, save_calibrated_with,
};
pub use fp8_candle::wide::backward;
pub use fp8_candle::{Role, Slot, StateTable};
pub use fp8_derive::Fp8Module;
pub use fp8_files::{Error as FilesError, atomic, audit, load, read};
pub use fp8_optim as optim;
pub use fp8_optim::{GradAccumulator, check_gradients};
pub use module::{Fp8Layer, Fp8Module, Fp8Operator, LayerKind, Visitor};
pub use prepare::{
    CAST_TENSORS, CastRow, CastTable, LayerChoice, LayerReport, Note, Outcome, PrepareOptions,
    PrepareReport, Unmatched, prepare_fp8,
};
pub use stats::{
    CastEvent, CastObserver, CastStats, StatsCurves, StatsLog, StatsQuantity, StatsReport, StatsRow,
};
pub use train_state::TrainState;
#[doc(hidden)]
pub use warning::warn;
