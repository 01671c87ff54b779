//! Training checkpoints: everything that a run needs to continue bit for bit, in one safetensors file.
//!
//! | tensors | names |
//! |---|---|
//! | variables | their names in the VarMap |
//! | FP8 state | `fp8/` + the columns of the model's table: quant_scale, dequant_scale, amax_history, calibrated_amax, kept_quant_scale, non_finite |
//! | optimizer | `optimizer/` + the optimizer's own names |
//!
//! The metadata holds, as JSON, the recipe, the step, the random state, the names of the table's rows, the optimizer's name and
//! hyperparameters, the state of a loss scaler ([`LossScaled`](crate::optim::LossScaled)), and the caller's own values. Save
//! after an optimizer step: a checkpoint does not hold the amaxes of an unfinished backward pass.
//!
//! ```
//! # use fp8_recipes as fp8;
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
//! use fp8::optim::{AdamW, AdamWConfig};
//! use fp8::{PrepareOptions, Recipe, nn, prepare_fp8, with_fp8};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("run.safetensors");
//! let recipe: Recipe = "delayed".parse()?;
//! let make = || -> Result<_, Box<dyn std::error::Error>> {
//!     let vars = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//!     let model = nn::linear(16, 8, vb.pp("fc"))?;
//!     prepare_fp8(&model, &PrepareOptions::default())?;
//!     let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
//!     Ok((vars, model, optimizer))
//! };
//! let (vars, model, mut optimizer) = make()?;
//! let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
//! let loss = with_fp8(recipe.clone(), || model.forward(&x))?.sqr()?.mean_all()?;
//! optimizer.apply(&loss.backward()?)?;
//! let meta = TrainingMeta {
//!     step: 1,
//!     recipe: Some(recipe.clone()),
//!     random: serde_json::json!({ "seed": 17 }),
//!     extra: serde_json::Value::Null,
//! };
//! save_training(&path, &model, &vars, &optimizer, &meta)?;
//!
//! // In the next process:
//! let (vars, model, mut optimizer) = make()?;
//! let meta = resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe))?;
//! assert_eq!((meta.step, optimizer.steps()?), (1, 1));
//! # Ok(()) }
//! ```
//!
//! [`save_fp8_state`] writes the same without an optimizer, for a model that only evaluates or whose optimizer starts fresh.
//!
//! Runs can start from other files:
//!
//! | you have | call |
//! |---|---|
//! | a checkpoint of an f32 run, to continue in FP8, or the reverse, or with another recipe or optimizer | [`resume_training_with`] |
//! | weights alone (`VarMap::save`, a model from elsewhere), to train in FP8 | [`load::dequantize_into`](crate::load::dequantize_into), then a new optimizer |
//! | an FP8 checkpoint, to train all of its weights | the same, which dequantizes them |
//! | an FP8 checkpoint, to train adapters on top of it | [`load::var_builder`](crate::load::var_builder), and the adapters in a VarMap of their own |

mod fp8;
mod meta;
mod options;
mod prepared;
mod ranks;
mod resume;
mod save;
mod sharded;
mod state;

pub use fp8::{Fp8Rows, fp8_state};
pub use meta::{TrainingMeta, training_meta};
pub use options::{Restored, ResumeOptions, ResumeReport};
pub use prepared::{cast_counts, quantized_tensors};
pub use ranks::gather_state;
pub use resume::{resume_training, resume_training_with};
pub use save::save_training;
pub use sharded::{resume_sharded, save_gathered, save_sharded};
pub use state::{load_fp8_state, save_fp8_state};
