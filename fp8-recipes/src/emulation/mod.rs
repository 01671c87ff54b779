//! Training in emulated FP8, as the FP8 Emulation Toolkit does it: every operator's tensors cast, gradients rounded
//! stochastically, the loss scaled.
//!
//! | the toolkit | here |
//! |---|---|
//! | `MPTConfig`, `mpt_emu.initialize(model, optimizer, "hybrid", list_exempt_layers=[..])` | [`Emulator::initialize`] with [`EmulatorOptions::with_exempt`]; the model's layers are those of [`nn`](crate::nn) |
//! | `list_layers_output_fused` | [`EmulatorOptions::with_output_fused`] |
//! | the forward pass of the patched model | the same inside of [`Emulator::autocast`]'s guard |
//! | `emulator.update_global_steps(n)` | [`Emulator::update_global_steps`] |
//! | `emulator.optimizer_step(optimizer)` after `scaled_loss.backward()` | [`Emulator::optimizer_step`], which does both |
//! | `model.eval()` | `autocast().training(false)` |
//! | `torch.save` of model, optimizer and emulator | [`save_training`](crate::checkpoint::save_training) of [`Emulator::with_optimizer`] |
//! | `emulator.fuse_bnlayers_and_quantize_model(model)` | [`nn::fuse_batch_norm`](crate::nn), [`quantize_model`](crate::quantize_model) |
//!
//! ```
//! # use fp8_recipes as fp8;
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
//! use fp8::optim::{Sgd, SgdConfig};
//! use fp8::{nn, with_fp8};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let model = nn::linear(8, 2, vb.pp("fc"))?;
//! let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
//!
//! let mut emulator = Emulator::initialize(&model, EmulationMethod::ScaledHybrid, EmulatorOptions::default())?;
//! println!("{}", emulator.cast_table()?);
//! let x = Tensor::full(0.1f32, (4, 8), &Device::Cpu)?;
//! let y = with_fp8(emulator.autocast(), || model.forward(&x))?;
//! let step = emulator.optimizer_step(&mut optimizer, &y.sqr()?.mean_all()?)?;
//! assert!(!step.skipped());
//! assert_eq!(emulator.global_steps(), 1);
//! # Ok(()) }
//! ```

mod checkpoint;
mod emulator;
mod options;

pub use checkpoint::EmulatedOptimizer;
pub use emulator::Emulator;
pub use options::{EmulationMethod, EmulatorOptions};
