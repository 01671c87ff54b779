//! Parameters of [scaled arithmetic](fp8_scaled): named, built by the layers' own constructors, saved and loaded.
//!
//! | item | what it is |
//! |---|---|
//! | [`Array`], [`Layer`] | one definition of a model for plain and scaled tensors |
//! | [`ScaledVarMap`] | parameters by name, for a `VarBuilder` |
//! | [`ScaledTree`] | values by name, data and scales |
//! | [`save`], [`load`] | a tree in a safetensors file |
//! | [`save_training`], [`resume_training`] | parameters, optimizer and step; training continues bit for bit |
//!
//! [`optim::scaled`](crate::optim::scaled) trains them.
//!
//! ```
//! # use fp8_recipes as fp8;
//! use candle_core::{DType, Device};
//! use fp8::nn;
//! use fp8::scaled::ScaledVarMap;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
//! nn::linear(16, 8, params.var_builder().pp("fc"))?; // a layer: its parameters are in the map
//! assert_eq!(params.names(), ["fc.bias", "fc.weight"]);
//! assert_eq!(params.get("fc.weight")?.dtype(), DType::F16);
//! # Ok(()) }
//! ```

mod training;

pub use crate::array::{Array, Layer};
pub use fp8_scaled::{ScaleStorage, ScaledTree, ScaledVarMap, load, save};
pub use training::{TrainingState, resume_training, save_training, training_state};
