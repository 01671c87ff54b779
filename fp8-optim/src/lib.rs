//! AdamW and SGD whose state can be saved, parameter groups, master weights, loss scaling and learning rate schedules.
//!
//! candle-nn's AdamW keeps its moments private, so a run that uses it cannot be resumed, and it does not clip gradients. The [`AdamW`]
//! here computes the same update in the same order of operations, takes named variables, clips by the global norm, skips steps whose
//! gradients are not finite, and resumes bit for bit.
//!
//! # Design
//! An optimizer is a [`Rule`] in an [`Engine`]. The rule is a configuration with moments and one formula, written in [`Real`] numbers, which
//! runs over host memory in f32 and over tensors of any dtype and device. The engine does all the rest: groups, the order of a step,
//! clipping, the veto of non-finite casts, the step counter, reports and states. Its second type parameter is the storage of a parameter:
//! a variable with f32 moments and perhaps a master copy, or scaled data with scaled moments.
//!
//! | file | concern |
//! |---|---|
//! | `adamw.rs`, `sgd.rs` | one optimizer each: configuration, moments, formula, and the formula in units of scales |
//! | `rule.rs`, `real.rs`, `settings.rs` | [`Rule`]; the arithmetic of formulas; hyperparameters that all rules have |
//! | `engine.rs`, `parameter.rs`, `shared.rs`, `resume.rs` | [`Engine`]: the order of a step; one stored parameter; what all share; the state |
//! | `host/`, `memory.rs` | a formula over host memory: pieces in f32, rounding, in place and in parallel |
//! | `plain/` | variables: moments and masters, candle's operations, kernels of a CUDA device |
//! | [`scaled`] | scaled parameters: the choice of scales, gradients in FP8 |
//! | `moments/` | [`MomentStorage`]: moments in f32, or in FP8 by blocks |
//! | `masters.rs`, `rounding.rs` | [`MasterDType`]; the rounding of scaled parameters, and counts of it |
//! | `groups.rs`, `schedule.rs` | [`ParamGroup`], [`LrSchedule`] |
//! | `norm.rs`, `veto.rs`, `counter.rs`, `report.rs` | parts of a step: the norm of gradients, non-finite casts, the step counter, [`StepReport`] |
//! | `state.rs`, `state_reader.rs`, `candle.rs` | [`ResumableOptimizer`]: what a training checkpoint needs of an optimizer; candle-nn's optimizers in a checkpoint |
//! | `loss_scaler.rs`, `loss_scaler_config.rs`, `loss_scaled.rs`, `unscale.rs` | [`DynamicLossScaler`], its steps, [`LossScaled`] |
//! | `exchange.rs`, `plain/sharded.rs` | optimizers of parameters in parts: what the ranks tell each other in a step |
//! | `divided.rs`, `plain/parts.rs` | the same where some variables are in parts and the others whole |
//! | `data_parallel/` | [`DataParallel`]: the mean of gradients over ranks |
//! | `accumulator.rs`, `gradients.rs` | [`GradAccumulator`], [`check_gradients`], gradients that fit |
//!
//! A new optimizer is a file like `sgd.rs` and a line here.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_nn::{VarBuilder, VarMap};
//! # use fp8_optim::{AdamW, AdamWConfig, LrSchedule};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let w = vb.get_with_hints(3, "w", candle_nn::Init::Const(1.0))?;
//! let config = AdamWConfig { max_grad_norm: Some(1.0), ..AdamWConfig::default() };
//! let mut optimizer = AdamW::from_varmap(&vars, config)?;
//! let schedule = LrSchedule::cosine(3e-4, 100, 1000);
//! for step in 0..2 {
//!     optimizer.set_lr(schedule.lr(step))?;
//!     let report = optimizer.apply(&w.sqr()?.sum_all()?.backward()?)?;
//!     assert!(!report.skipped()?);
//! }
//! let saved = optimizer.state()?; // named tensors, ready for a safetensors file
//! assert!(saved.contains_key("w.exp_avg"));
//! # Ok(())
//! # }
//! ```

#![doc(test(attr(deny(warnings))))]

mod accumulator;
mod adamw;
mod candle;
mod counter;
mod data_parallel;
mod divided;
mod engine;
mod error;
mod exchange;
mod gradients;
mod groups;
mod host;
mod loss_scaled;
mod loss_scaler;
mod loss_scaler_config;
mod masters;
mod memory;
mod moments;
mod norm;
mod parameter;
mod plain;
mod real;
mod report;
mod resume;
mod rounding;
mod rule;
pub mod scaled;
mod schedule;
mod settings;
mod sgd;
mod shared;
mod state;
mod state_reader;
mod unscale;
mod veto;

pub use accumulator::GradAccumulator;
pub use adamw::{AdamW, AdamWConfig};
pub use data_parallel::{DataParallel, DataParallelOptions, GradientTravel};
pub use engine::Engine;
pub use error::OptimError;
pub use gradients::check_gradients;
pub use groups::ParamGroup;
pub use loss_scaled::{LossScaled, LossScaledStep};
pub use loss_scaler::{DynamicLossScaler, LossScalerState};
pub use loss_scaler_config::LossScalerConfig;
pub use masters::MasterDType;
pub use moments::{Fp8Moments, MomentStorage};
pub use plain::{NamedOptimizer, Variable};
pub use real::Real;
pub use report::StepReport;
pub use rule::{Moment, Rates, Rule};
pub use schedule::LrSchedule;
pub use settings::{DecayScope, Settings};
pub use sgd::{Sgd, SgdConfig};
pub use state::{NoOptimizer, OptimizerState, ResumableOptimizer, STEP_NAME};
