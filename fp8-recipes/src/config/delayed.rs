//! Delayed scaling: scales from the amaxes of earlier steps.

use fp8_core::setters;
use std::fmt;

use fp8_core::{AmaxCompute, DelayedRule, Format, MAX_HISTORY_LEN, ScaleRounding};
use serde::{Deserialize, Serialize};

use super::{ConfigError, amax_text};

/// Largest magnitude of a margin, which keeps `max * 2^-margin` far from the limits of f32. Within it only an amax near 1e38
/// would need a scale below the range of f32; its scale is f32's smallest normal number.
const MARGIN_LIMIT: i32 = 64;

/// The formats of the forward and the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DelayedFormat {
    /// E4M3 forward (more precision), E5M2 backward (more range).
    #[default]
    Hybrid,
    /// E4M3 both ways.
    E4m3,
    /// E5M2 both ways.
    E5m2,
}

impl DelayedFormat {
    /// Format of inputs and weights.
    pub fn forward(self) -> Format {
        match self {
            DelayedFormat::Hybrid | DelayedFormat::E4m3 => Format::E4M3,
            DelayedFormat::E5m2 => Format::E5M2,
        }
    }

    /// Format of output gradients.
    pub fn backward(self) -> Format {
        match self {
            DelayedFormat::E4m3 => Format::E4M3,
            DelayedFormat::Hybrid | DelayedFormat::E5m2 => Format::E5M2,
        }
    }
}

names! { DelayedFormat::name: Hybrid = "hybrid", E4m3 = "e4m3", E5m2 = "e5m2" }

/// The scale of a tensor before anything was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum InitialScale {
    /// The first step casts with `quant_scale` 1, as Transformer Engine does.
    #[default]
    One,
    /// Casts before the first update take the scale of their own amax, so each rank has its own in the first step. The first
    /// update takes the amaxes of all casts of all ranks.
    FirstBatch,
}

names! { InitialScale::name: One = "one", FirstBatch = "first_batch" }

/// Delayed scaling: a tensor is cast with a tensorwise scale computed from the amaxes of earlier steps, so a cast reads the
/// data once.
///
/// The defaults are Transformer Engine's; setters return a changed copy. As a [`super::Recipe`] it stands for six delayed
/// casts; [`Fp8LinearConfig::with_delayed`](super::Fp8LinearConfig::with_delayed) sets the rule of the delayed casts of any
/// configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct DelayedScaling {
    /// Headroom in powers of two: `quant_scale = max * 2^-margin / amax`. Default 0, at most 64
    /// either way.
    pub margin: i32,
    /// Formats of delayed casts that do not set their own. In JSON `hybrid` (default), `e4m3`, `e5m2`.
    pub format: DelayedFormat,
    /// Steps that the history remembers. Default 1024, at least 1, at most [`fp8_core::MAX_HISTORY_LEN`].
    pub amax_history_len: usize,
    /// How the history is reduced to one amax. In JSON `max` (default) or `most_recent`; a function in code is written as
    /// `custom:NAME`, and after reading has to be bound to that name again ([`super::Recipe::bind_amax_compute`]).
    #[serde(with = "amax_text")]
    pub amax_compute: AmaxCompute,
    /// Whether scales are rounded down to powers of two. In JSON `exact` (default), `power_of_two`.
    pub scale_rounding: ScaleRounding,
    /// The scale of the first step. In JSON `one` (default), `first_batch`.
    pub initial: InitialScale,
    /// Whether data-parallel ranks share amaxes (by maximum) at each update. Default true; without
    /// a reduction group it has no effect.
    pub reduce_amax: bool,
}

impl Default for DelayedScaling {
    fn default() -> Self {
        Self {
            margin: 0,
            format: DelayedFormat::Hybrid,
            amax_history_len: 1024,
            amax_compute: AmaxCompute::Max,
            scale_rounding: ScaleRounding::Exact,
            initial: InitialScale::One,
            reduce_amax: true,
        }
    }
}

/// The settings of other libraries. Each can be changed further, also to a reduction of your own ([`AmaxCompute::Custom`]).
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{AmaxCompute, CustomAmax, DelayedScaling};
/// let mean = |history: &[f32]| history.iter().sum::<f32>() / history.len() as f32;
/// let recipe = DelayedScaling::fp8layers()
///     .with_amax_compute(AmaxCompute::Custom(CustomAmax::new("mean", mean)));
/// assert_eq!(
///     recipe.to_string(),
///     "delayed(amax_history_len=16,amax_compute=custom:mean,scale_rounding=power_of_two)"
/// );
/// ```
impl DelayedScaling {
    /// Transformer Engine's `DelayedScaling()`, the defaults: 1024 steps, their largest amax, exact scales, margin 0.
    pub fn transformer_engine() -> Self {
        Self::default()
    }

    /// flax's `Fp8DotGeneral`: the same rule as [`DelayedScaling::transformer_engine`], and the same casts.
    ///
    /// flax computes a scale at the beginning of a step, before it pushes the step's amax, and stores the scale that it used. Here
    /// the scale is computed at the end of the step before, from the same amaxes. So the `*_scale` that flax holds after a step is
    /// the dequant_scale that this library used during it. Its `*_amax_history` is a [`fp8_core::HistoryOrder::Ring`], which
    /// converts a state of flax.
    ///
    /// A tensor of zeros pushes a 0 in flax and nothing here. A weight that does not change (frozen, or in further micro-batches)
    /// pushes its amax in every step in flax, and once here, because it is cast once.
    pub fn flax() -> Self {
        Self::default()
    }

    /// NVIDIA's `fp8layers` for TensorFlow and JAX: 16 steps, their largest amax, scales that are powers of two.
    ///
    /// Its scale is `2^floor(log2(max / amax))` with a logarithm in f32, which rounds up where the quotient lies an ulp or two
    /// below a power of two. Here the quotient itself is rounded down, which in those cases gives half of its scale. A tensor of
    /// zeros pushes a 0 there and nothing here.
    pub fn fp8layers() -> Self {
        Self::default()
            .with_amax_history_len(16)
            .with_scale_rounding(ScaleRounding::PowerOfTwo)
    }

    /// Intel's `intel_extension_for_pytorch.quantization.fp8`: 1024 steps, their largest amax, margin 0, scales that are powers
    /// of two, computed as in [`DelayedScaling::fp8layers`].
    ///
    /// A tensor of zeros pushes a 0 there and nothing here. A non-finite amax turns the scale into its reciprocal there; here it
    /// is counted and changes nothing.
    pub fn ipex() -> Self {
        Self::default().with_scale_rounding(ScaleRounding::PowerOfTwo)
    }

    /// Checks the margin and the length of the history, and that a custom reduction is bound to its function.
    ///
    /// # Errors
    /// [`ConfigError::Margin`], [`ConfigError::HistoryLength`], [`ConfigError::UnboundAmax`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_history_len(self.amax_history_len)?;
        if !(-MARGIN_LIMIT..=MARGIN_LIMIT).contains(&self.margin) {
            return Err(ConfigError::Margin {
                got: self.margin,
                limit: MARGIN_LIMIT,
            });
        }
        match &self.amax_compute {
            AmaxCompute::Custom(custom) if !custom.is_bound() => Err(ConfigError::UnboundAmax {
                name: custom.name().to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// The rule by which an update computes a scale from a history.
    pub fn rule(&self) -> DelayedRule {
        DelayedRule::default()
            .with_margin(self.margin)
            .with_amax_compute(self.amax_compute.clone())
            .with_scale_rounding(self.scale_rounding)
    }
}

setters! { DelayedScaling:
    with_margin(margin: i32);
    with_format(format: DelayedFormat);
    with_amax_history_len(amax_history_len: usize);
    with_amax_compute(amax_compute: AmaxCompute);
    with_scale_rounding(scale_rounding: ScaleRounding);
    with_initial(initial: InitialScale);
    with_reduce_amax(reduce_amax: bool);
}

/// Checks the length of amax histories: each row of the state holds as many numbers.
pub(crate) fn check_history_len(got: usize) -> Result<(), ConfigError> {
    let limit = MAX_HISTORY_LEN;
    if (1..=limit).contains(&got) {
        Ok(())
    } else {
        Err(ConfigError::HistoryLength { got, limit })
    }
}

/// `delayed`, followed by the settings that differ from the defaults:
/// `delayed(amax_history_len=16,amax_compute=most_recent)`.
impl fmt::Display for DelayedScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let mut settings = vec![];
        macro_rules! differing {
            ($($field:ident),*) => {$(
                if self.$field != default.$field {
                    settings.push(format!("{}={}", stringify!($field), self.$field));
                }
            )*};
        }
        differing!(
            margin,
            format,
            amax_history_len,
            amax_compute,
            scale_rounding,
            initial,
            reduce_amax
        );
        f.write_str("delayed")?;
        if settings.is_empty() {
            Ok(())
        } else {
            write!(f, "({})", settings.join(","))
        }
    }
}
