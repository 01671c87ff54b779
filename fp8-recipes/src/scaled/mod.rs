//! Parameters of [scaled arithmetic](fp8_candle::scaled): named, built by the layers' own constructors, saved and loaded.
//!
//! | item | what it is |
//! |---|---|
//! | [`ScaledVarMap`] | parameters by name, for a `VarBuilder` |
//! | [`ScaledTree`] | values by name, data and scales |
//! | [`save`], [`load`] | a tree in a safetensors file |
//! | [`save_training`], [`resume_training`] | parameters, optimizer and step; training goes on bit for bit |
//!
//! [`optim::scaled`](crate::optim::scaled) trains them.
//!
//! ```
//! use candle_core::{DType, Device};
//! use fp8_candle::scaled::ScaledVar;
//! use fp8_recipes::nn;
//! use fp8_recipes::scaled::ScaledVarMap;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
//! let fc = nn::linear(16, 8, params.var_builder().pp("fc"))?;
//! assert_eq!(params.names(), ["fc.bias", "fc.weight"]);
//! assert_eq!(params.get("fc.weight")?.dtype(), DType::F16);
//! # Ok(()) }
//! ```

mod checkpoint;
mod training;
mod tree;
mod var_map;

pub use checkpoint::{ScaleStorage, load, save};
pub use training::{TrainingState, resume_training, save_training};
pub use tree::ScaledTree;
pub use var_map::ScaledVarMap;
