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
//! | `emulator.fuse_bnlayers_and_quantize_model(model)` | [`nn::fuse_batch_norm`](crate::nn), [`quantize_model`](crate::quantize_model) |
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
//! use fp8_recipes::optim::{Sgd, SgdConfig};
//! use fp8_recipes::{nn, with_fp8};
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

use crate::autocast::Autocast;
use crate::config::{Fp8LinearConfig, RecipeName};
use crate::error::{Error, Result};
use crate::module::Fp8Module;
use crate::optim::{DynamicLossScaler, LossScalerConfig, NamedOptimizer, ScaledStep, StepReport};
use crate::prepare::{CastTable, PrepareOptions, PrepareReport, prepare_fp8, unmatched};
use crate::stats::CastStats;
use candle_core::Tensor;
use std::fmt;
use std::str::FromStr;

/// Which formats an emulated training uses.
///
/// ```
/// use fp8_recipes::emulation::EmulationMethod;
///
/// assert_eq!("hybrid".parse::<EmulationMethod>()?, EmulationMethod::ScaledHybrid);
/// # Ok::<(), fp8_recipes::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EmulationMethod {
    /// [`RecipeName::Direct`]: E5M2 without scales.
    Direct,
    /// [`RecipeName::Hybrid`]: E4M3 with a scale per tensor forward, E5M2 without scales backward.
    ScaledHybrid,
}

impl EmulationMethod {
    /// The recipe that does it.
    ///
    /// ```
    /// use fp8_recipes::RecipeName;
    /// use fp8_recipes::emulation::EmulationMethod;
    /// assert_eq!(EmulationMethod::ScaledHybrid.recipe_name(), RecipeName::Hybrid);
    /// ```
    pub fn recipe_name(self) -> RecipeName {
        match self {
            Self::Direct => RecipeName::Direct,
            Self::ScaledHybrid => RecipeName::Hybrid,
        }
    }
}

impl fmt::Display for EmulationMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.recipe_name().as_str())
    }
}

impl FromStr for EmulationMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "hybrid" => Ok(Self::ScaledHybrid),
            _ => Err(crate::config::ConfigError::UnknownRecipe {
                got: text.to_string(),
                valid: "direct, hybrid".into(),
            }
            .into()),
        }
    }
}

/// What an [`Emulator`] is told beside its method.
///
/// ```
/// use fp8_recipes::emulation::EmulatorOptions;
/// use fp8_recipes::optim::LossScalerConfig;
///
/// let options = EmulatorOptions::default()
///     .with_exempt("layers.0")
///     .with_output_fused("blocks.*.conv")
///     .with_loss_scaler(LossScalerConfig::default().with_min_loss_scale(1.))
///     .with_seed(17);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EmulatorOptions {
    /// Layers and operators left in high precision, by path or glob.
    pub exempt: Vec<String>,
    /// Layers and operators whose outputs, and the gradients of these, are left in high precision, by path or glob.
    pub output_fused: Vec<String>,
    /// How the loss is scaled.
    pub loss_scaler: LossScalerConfig,
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Rounds to f16 before each cast, as the toolkit does.
    pub via_f16: bool,
    /// Where casts are measured; None costs nothing.
    pub stats: Option<CastStats>,
    /// Steps from one that is measured to the next; 0 counts as 1.
    pub stats_every: u64,
}

impl EmulatorOptions {
    /// One more pattern of layers in high precision.
    #[must_use]
    pub fn with_exempt(mut self, pattern: impl Into<String>) -> Self {
        self.exempt.push(pattern.into());
        self
    }

    /// One more pattern of layers whose outputs stay in high precision.
    #[must_use]
    pub fn with_output_fused(mut self, pattern: impl Into<String>) -> Self {
        self.output_fused.push(pattern.into());
        self
    }

    /// Scales the loss so.
    #[must_use]
    pub fn with_loss_scaler(mut self, config: LossScalerConfig) -> Self {
        self.loss_scaler = config;
        self
    }

    /// Rounds with this seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Rounds to f16 first, or not.
    #[must_use]
    pub fn with_via_f16(mut self, via_f16: bool) -> Self {
        self.via_f16 = via_f16;
        self
    }

    /// Measures the casts of every `every`th step.
    #[must_use]
    pub fn with_stats(mut self, stats: &CastStats, every: u64) -> Self {
        self.stats = Some(stats.clone());
        self.stats_every = every;
        self
    }
}

/// A training run in emulated FP8: a prepared model, the recipe for its guards, a loss scaler and a count of steps.
///
/// The loss scaler's state is saved with [`LossScaled`](crate::optim::LossScaled), or as
/// [`LossScalerState`](crate::optim::LossScalerState) by the program itself.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
/// # use fp8_recipes::{nn, with_fp8};
/// use fp8_recipes::optim::{Sgd, SgdConfig};
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
    stats: Option<(CastStats, u64)>,
}

impl Emulator {
    /// Prepares the layers and operators of `model` for `method`.
    ///
    /// # Errors
    /// [`Error::UnmatchedPattern`] for a pattern that names no layer, with names that it may have meant; a malformed pattern; an
    /// invalid configuration of the loss scaler; and what [`prepare_fp8`] finds.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// let options = EmulatorOptions::default().with_exempt("fc");
    /// let emulator = Emulator::initialize(&model, EmulationMethod::Direct, options)?;
    /// assert_eq!(emulator.report().converted(), 0);
    ///
    /// let options = EmulatorOptions::default().with_exempt("cf");
    /// let error = Emulator::initialize(&model, EmulationMethod::Direct, options).unwrap_err();
    /// assert!(matches!(error, fp8_recipes::Error::UnmatchedPattern { .. }));
    /// # Ok(()) }
    /// ```
    pub fn initialize<M: Fp8Module + ?Sized>(
        model: &M,
        method: EmulationMethod,
        options: EmulatorOptions,
    ) -> Result<Self> {
        let mut prepare = PrepareOptions::default()
            .with_operators(true)
            .with_convolutions(true)
            .with_amax_history_len(1);
        for pattern in &options.exempt {
            prepare = prepare.with_off(pattern)?;
        }
        for pattern in &options.output_fused {
            prepare = prepare.with_output_fused(pattern)?;
        }
        let loss_scaler = DynamicLossScaler::new(options.loss_scaler)?;
        // Before anything of the model changes.
        if let Some(first) = unmatched(model, &prepare).into_iter().next() {
            return Err(Error::UnmatchedPattern {
                pattern: first.pattern,
                near: first.near,
            });
        }
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
            stats: options
                .stats
                .map(|stats| (stats, options.stats_every.max(1))),
        })
    }

    /// Its method.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert_eq!(emulator.method(), EmulationMethod::Direct);
    /// # Ok(()) }
    /// ```
    pub fn method(&self) -> EmulationMethod {
        self.method
    }

    /// What the guards of this run switch on: around each forward pass of training, and with `training(false)` of evaluation.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// let x = Tensor::full(1.1f32, (4, 32), &Device::Cpu)?;
    /// let y = with_fp8(emulator.autocast().training(false), || model.forward(&x))?;
    /// assert_ne!(y.to_vec2::<f32>()?, model.forward(&x)?.to_vec2::<f32>()?);
    /// # Ok(()) }
    /// ```
    pub fn autocast(&self) -> Autocast {
        let autocast = Autocast::new(self.config.clone());
        match &self.stats {
            Some((stats, every)) if self.global_steps.is_multiple_of(*every) => {
                autocast.with_stats(stats)
            }
            _ => autocast,
        }
    }

    /// What became of each layer and operator.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert_eq!(emulator.report().converted(), 1);
    /// # Ok(()) }
    /// ```
    pub fn report(&self) -> &PrepareReport {
        &self.report
    }

    /// The casts of each prepared layer and operator.
    ///
    /// # Errors
    /// If the recipe of a layer is inconsistent.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert!(emulator.cast_table()?.to_string().contains("uns_ten_e5m2"));
    /// # Ok(()) }
    /// ```
    pub fn cast_table(&self) -> Result<CastTable> {
        Ok(self.report.cast_table(self.config.clone())?)
    }

    /// Steps taken, or told by [`Emulator::update_global_steps`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert_eq!(emulator.global_steps(), 0);
    /// # Ok(()) }
    /// ```
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Says how many steps are done, in a run that goes on: statistics go by it.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// emulator.update_global_steps(1000);
    /// assert_eq!(emulator.global_steps(), 1000);
    /// # Ok(()) }
    /// ```
    pub fn update_global_steps(&mut self, steps: u64) {
        self.global_steps = steps;
    }

    /// How the loss is scaled now, and how many steps were left out.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert_eq!(emulator.loss_scaler().skipped_steps(), 0);
    /// # Ok(()) }
    /// ```
    pub fn loss_scaler(&self) -> &DynamicLossScaler {
        &self.loss_scaler
    }

    /// The loss scaler, for example to load its state.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// let mut other = fp8_recipes::optim::DynamicLossScaler::default();
    /// other.update(true);
    /// emulator.loss_scaler_mut().load_state(&other.state())?;
    /// assert_eq!(emulator.loss_scaler().loss_scale(), 32768.);
    /// # Ok(()) }
    /// ```
    pub fn loss_scaler_mut(&mut self) -> &mut DynamicLossScaler {
        &mut self.loss_scaler
    }

    /// The backward pass of the scaled loss, the division, the check of every gradient element, and the optimizer's step or none. Counts
    /// a step either way.
    ///
    /// # Errors
    /// The optimizer's or candle's; the count and the loss scale stay as they were.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// use fp8_recipes::optim::{Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
    /// let loss = (model.weight()?.sum_all()? * f64::INFINITY)?;
    /// assert!(emulator.optimizer_step(&mut optimizer, &loss)?.skipped());
    /// assert_eq!((emulator.global_steps(), optimizer.steps()), (1, 0));
    /// # Ok(()) }
    /// ```
    pub fn optimizer_step<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        loss: &Tensor,
    ) -> Result<ScaledStep<StepReport>> {
        let step = self.loss_scaler.backward_step(loss, optimizer)?;
        self.global_steps += 1;
        Ok(step)
    }
}
