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
mod measured;
mod options;
mod step;

pub use checkpoint::EmulatedOptimizer;
pub use options::{EmulationMethod, EmulatorOptions};

use crate::autocast::Autocast;
use crate::config::ConfigError;
use crate::config::Fp8LinearConfig;
use crate::error::Result;
use crate::module::Fp8Module;
use crate::optim::DynamicLossScaler;
use crate::prepare::{CastTable, PrepareOptions, PrepareReport, named, prepare_fp8};
use measured::Measured;

/// A training run in emulated FP8: a prepared model, the recipe for its guards, a loss scaler and a count of steps.
///
/// A training checkpoint takes its loss scaler and its count with the optimizer: [`Emulator::with_optimizer`].
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
/// # use fp8_recipes::{nn, with_fp8};
/// use fp8::optim::{Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vars = VarMap::new();
/// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
/// let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
/// let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
/// let x = Tensor::full(0.1f32, (4, 32), &Device::Cpu)?;
/// for _ in 0..2 {
///     let y = with_fp8(emulator.autocast(), || model.forward(&x))?;
///     emulator.optimizer_step(&mut optimizer, &y.sqr()?.mean_all()?)?;
/// }
/// assert_eq!((emulator.global_steps(), optimizer.steps()), (2, 2));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Emulator {
    method: EmulationMethod,
    config: Fp8LinearConfig,
    report: PrepareReport,
    loss_scaler: DynamicLossScaler,
    global_steps: u64,
    measured: Option<Measured>,
}

impl Emulator {
    /// Prepares the layers and operators of `model` for `method`.
    ///
    /// # Errors
    /// [`ConfigError::UnmatchedPattern`] for a pattern that names no layer, with names that it may have meant; a malformed pattern; an
    /// invalid configuration of the loss scaler; and what [`prepare_fp8`] finds.
    pub fn initialize<M: Fp8Module + ?Sized>(
        model: &M,
        method: EmulationMethod,
        options: EmulatorOptions,
    ) -> Result<Self> {
        let mut prepare = PrepareOptions::default()
            .with_operators(true)
            .with_amax_history_len(1);
        for pattern in &options.exempt {
            prepare = prepare.with_off(pattern)?;
        }
        for pattern in &options.output_fused {
            prepare = prepare.with_output_fused(pattern)?;
        }
        let loss_scaler = DynamicLossScaler::new(options.loss_scaler.clone())?;
        // Before anything of the model changes.
        if let Some(first) = named(model, &prepare).unmatched.into_iter().next() {
            return Err(ConfigError::UnmatchedPattern {
                pattern: first.pattern,
                near: first.near,
            }
            .into());
        }
        let measured = Measured::new(&options);
        let report = prepare_fp8(model, &prepare)?;
        let config = Fp8LinearConfig::from_recipe_name(method.recipe_name())
            .with_seed(options.seed)
            .with_via_f16(options.via_f16);
        Ok(Self {
            method,
            config,
            report,
            loss_scaler,
            global_steps: 0,
            measured,
        })
    }

    /// Its method.
    pub fn method(&self) -> EmulationMethod {
        self.method
    }

    /// What the guards of this run switch on: around each forward pass of training, and with `training(false)` of evaluation, which
    /// is not measured.
    pub fn autocast(&self) -> Autocast {
        let autocast = Autocast::new(self.config.clone());
        Autocast {
            training_stats: self.due().map(|measured| measured.stats.clone()),
            ..autocast
        }
    }

    /// What became of each layer and operator.
    pub fn report(&self) -> &PrepareReport {
        &self.report
    }

    /// The casts of each prepared layer and operator.
    ///
    /// # Errors
    /// If the recipe of a layer is inconsistent.
    pub fn cast_table(&self) -> Result<CastTable> {
        Ok(self.report.cast_table(self.config.clone())?)
    }

    /// Steps taken, or told by [`Emulator::update_global_steps`].
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Says how many steps are done, in a run that goes on: statistics go by it.
    pub fn update_global_steps(&mut self, steps: u64) {
        self.global_steps = steps;
    }
}
