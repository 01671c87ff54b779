//! AdamW and SGD whose state can be saved, parameter groups, master weights, loss scaling and learning rate schedules.
//!
//! candle-nn's AdamW keeps its moments private, so a run that uses it cannot be continued; it also
//! has no gradient clipping. The [`AdamW`] here computes the same update in the same order of
//! operations, works on named variables, clips by the global norm, skips a step whose gradients are
//! not finite, and resumes bit for bit.
//!
//! | file | concern |
//! |---|---|
//! | `adamw.rs`, `adamw_step.rs` | [`AdamW`]: construction, one step, candle's [`Optimizer`](candle_nn::Optimizer) trait |
//! | `params.rs` | [`AdamWConfig`] and its validation |
//! | `sgd.rs`, `sgd_config.rs`, `sgd_slot.rs`, `sgd_update.rs`, `sgd_state.rs` | [`Sgd`], its hyperparameters, one variable, the update in place, saving and loading |
//! | `named.rs` | [`NamedOptimizer`]; variables by name and their gradients |
//! | `groups.rs` | [`ParamGroup`]: hyperparameters of their own by name |
//! | `masters.rs`, `elements.rs` | [`MasterDType`]: master weights, and the loops that round at random |
//! | `loss_scaler.rs`, `loss_scaler_config.rs`, `scaled_step.rs`, `unscale.rs` | [`DynamicLossScaler`]; its whole steps; gradients divided and checked in one pass |
//! | `loss_scaled.rs` | [`LossScaled`]: an optimizer with its loss scaler in a checkpoint |
//! | `counter.rs` | the step counter, on the host or the device |
//! | `report.rs` | [`StepReport`] |
//! | `seen.rs` | Inf and NaN that casts of the model have seen: they veto the step; steps left out in a row |
//! | `slot.rs` | one variable with its moments; the choice between the fused and the composed update |
//! | `fused.rs` | the update in place over contiguous f32, bf16 and f16 on the CPU |
//! | `cuda.rs` | the variables of a CUDA device, updated together |
//! | `norm.rs` | the global gradient norm |
//! | `state.rs` | saving and loading |
//! | `checkpoint.rs` | [`CheckpointOptimizer`]: what a training checkpoint asks of any optimizer |
//! | `candle.rs` | candle-nn's optimizers in a checkpoint |
//! | [`scaled`] | SGD and AdamW of scaled parameters |
//! | `schedule.rs` | [`LrSchedule`] |
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_nn::{VarBuilder, VarMap};
//! # use fp8_recipes::optim::{AdamW, AdamWConfig, LrSchedule};
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

mod adamw;
mod adamw_step;
mod candle;
mod checkpoint;
mod counter;
#[cfg(feature = "cuda")]
mod cuda;
mod elements;
mod error;
mod fused;
mod groups;
mod loss_scaled;
mod loss_scaler;
mod loss_scaler_config;
mod masters;
mod named;
mod norm;
mod params;
mod report;
pub mod scaled;
mod scaled_step;
mod schedule;
mod sgd;
mod sgd_config;
mod sgd_slot;
mod sgd_state;
mod sgd_update;
mod slot;
mod state;
mod unscale;
mod veto;

pub use adamw::AdamW;
pub use checkpoint::{CheckpointOptimizer, NoOptimizer, OptimizerState};
pub use error::OptimError;
pub use groups::ParamGroup;
pub use loss_scaled::LossScaled;
pub(crate) use loss_scaled::{load_scaled_state, scaled_state};
pub use loss_scaler::{DynamicLossScaler, LossScalerState};
pub use loss_scaler_config::LossScalerConfig;
pub use masters::MasterDType;
pub use named::NamedOptimizer;
pub use params::{AdamWConfig, DecayScope};
pub use report::StepReport;
pub use scaled_step::ScaledStep;
pub use schedule::LrSchedule;
pub use sgd::Sgd;
pub use sgd_config::SgdConfig;
pub(crate) use state::KIND as ADAMW_KIND;
pub use state::STEP_NAME;
pub(crate) use veto::CastVeto;
