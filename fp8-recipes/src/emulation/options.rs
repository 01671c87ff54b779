//! The method and the options of an emulator.

use crate::config::{ConfigError, RecipeName};
use crate::error::{Error, Result};
use crate::optim::LossScalerConfig;
use crate::stats::CastStats;
use fp8_core::setters;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Which formats an emulated training uses.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::emulation::EmulationMethod;
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
    /// The recipe with these formats.
    pub fn recipe_name(self) -> RecipeName {
        match self {
            Self::Direct => RecipeName::Direct,
            Self::ScaledHybrid => RecipeName::Hybrid,
        }
    }
}

names! { EmulationMethod::name, ALL: Direct = "direct", ScaledHybrid = "hybrid" }

impl FromStr for EmulationMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|method| method.name() == text);
        found.ok_or_else(|| {
            Error::from(ConfigError::UnknownRecipe {
                got: text.to_string(),
                valid: Self::ALL.map(Self::name).join(", "),
            })
        })
    }
}

/// The options of an [`Emulator`](super::Emulator).
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::emulation::EmulatorOptions;
/// use fp8::optim::LossScalerConfig;
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
    /// Measures casts; with neither this nor `stats_log` nothing is measured.
    pub stats: Option<CastStats>,
    /// Measures every n-th step; 0 counts as 1.
    pub stats_every: u64,
    /// A file to which each measured step is appended.
    pub stats_log: Option<PathBuf>,
}

impl EmulatorOptions {
    /// Adds a pattern of layers that stay in high precision.
    #[must_use]
    pub fn with_exempt(mut self, pattern: impl Into<String>) -> Self {
        self.exempt.push(pattern.into());
        self
    }

    /// Adds a pattern of layers whose outputs stay in high precision.
    #[must_use]
    pub fn with_output_fused(mut self, pattern: impl Into<String>) -> Self {
        self.output_fused.push(pattern.into());
        self
    }

    /// Measures the casts of every `every`th step, the first one included, into `stats`. Evaluation is not measured, unless its
    /// guard is given statistics of its own ([`Autocast::with_stats`](crate::Autocast::with_stats)).
    #[must_use]
    pub fn with_stats(mut self, stats: &CastStats, every: u64) -> Self {
        self.stats = Some(stats.clone());
        self.stats_every = every;
        self
    }

    /// Measures the casts of every `every`th step, the first one included, and appends them to the file `path` as a
    /// [`StatsLog`](crate::StatsLog) does, under the number of steps that were done before: [`Emulator::optimizer_step`](super::Emulator::optimizer_step) writes them.
    /// Statistics of [`EmulatorOptions::with_stats`] are emptied by it.
    #[must_use]
    pub fn with_stats_log(mut self, path: impl AsRef<Path>, every: u64) -> Self {
        self.stats_log = Some(path.as_ref().to_path_buf());
        self.stats_every = every;
        self
    }
}

setters! { EmulatorOptions:
    with_loss_scaler(loss_scaler: LossScalerConfig);
    with_seed(seed: u64);
    with_via_f16(via_f16: bool);
}
