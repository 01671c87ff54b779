//! Delayed scaling: the amax history of a tensor and the quant_scale made from it (Transformer Engine's recipe).

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::{
    Format,
    error::{ParseNameError, named},
    scaling::{delayed_quant_scale, floor_to_power_of_two},
};

/// The longest history allowed: a million steps, four megabytes for each tensor that has one.
pub const MAX_HISTORY_LEN: usize = 1 << 20;

/// How a history is reduced to the one amax from which the scale is made.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum AmaxCompute {
    /// The largest amax of the window.
    #[default]
    Max,
    /// The newest amax.
    MostRecent,
    /// A function of your own. It cannot be serialized.
    Custom(CustomAmax),
}

type AmaxFn = dyn Fn(&[f32]) -> f32 + Send + Sync;

/// A named function from a history, newest amax first, to the amax from which the scale is made.
///
/// A result that is zero, infinite or NaN leaves the scale as it is. A value that was read from a file has only a name:
/// recipes refuse it until it is bound to its function.
#[derive(Clone)]
pub struct CustomAmax {
    name: Arc<str>,
    reduce: Option<Arc<AmaxFn>>,
}

impl CustomAmax {
    /// A reduction displayed as `name`.
    pub fn new(
        name: impl Into<Arc<str>>,
        reduce: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            reduce: Some(Arc::new(reduce)),
        }
    }

    /// A name without its function, as it comes from a file.
    pub fn unbound(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            reduce: None,
        }
    }

    /// Whether the name has a function.
    pub fn is_bound(&self) -> bool {
        self.reduce.is_some()
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The amax of `history`, whose first entry is the newest. Without a function 0, which leaves the scale as it is.
    pub fn call(&self, history: &[f32]) -> f32 {
        self.reduce.as_ref().map_or(0., |reduce| reduce(history))
    }
}

impl fmt::Debug for CustomAmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomAmax").field(&self.name).finish()
    }
}

impl PartialEq for CustomAmax {
    /// Equal names and, where both have a function, the very same one.
    fn eq(&self, other: &Self) -> bool {
        let same = match (&self.reduce, &other.reduce) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => true,
        };
        self.name == other.name && same
    }
}

impl AmaxCompute {
    /// The amax of `history`, whose first entry is the newest; 0 where it is empty.
    pub fn reduce(&self, history: &[f32]) -> f32 {
        match self {
            Self::Max => history.iter().copied().fold(0.0, f32::max),
            Self::MostRecent => history.first().copied().unwrap_or(0.0),
            Self::Custom(custom) => custom.call(history),
        }
    }
}

impl fmt::Display for AmaxCompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max => f.pad("max"),
            Self::MostRecent => f.pad("most_recent"),
            Self::Custom(custom) => write!(f, "custom:{}", custom.name),
        }
    }
}

impl FromStr for AmaxCompute {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "max" => Ok(Self::Max),
            "most_recent" => Ok(Self::MostRecent),
            _ => Err(ParseNameError {
                what: "amax reduction",
                name: name.to_owned(),
                expected: "max or most_recent",
            }),
        }
    }
}

impl Serialize for AmaxCompute {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Custom(custom) => Err(ser::Error::custom(format_args!(
                "the custom amax reduction {:?} is code and cannot be serialized; use max or most_recent",
                custom.name
            ))),
            named => serializer.collect_str(named),
        }
    }
}

impl<'de> Deserialize<'de> for AmaxCompute {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// Whether a quant_scale is used as computed or floored to a power of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScaleRounding {
    /// As computed.
    #[default]
    Exact,
    /// Floored to a power of two, so that scaling itself rounds nothing.
    PowerOfTwo,
}

impl ScaleRounding {
    /// `quant_scale` under this rounding.
    pub fn apply(self, quant_scale: f32) -> f32 {
        match self {
            Self::Exact => quant_scale,
            Self::PowerOfTwo => floor_to_power_of_two(quant_scale),
        }
    }
}

named!(ScaleRounding, "scale rounding", "exact or power_of_two": Exact "exact", PowerOfTwo "power_of_two");

/// The part of a delayed-scaling recipe that one update needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct DelayedRule {
    /// Powers of two to keep free above the amax: the quant_scale is divided by `2^margin`.
    pub margin: i32,
    /// How the history is reduced.
    pub amax_compute: AmaxCompute,
    /// How the quant_scale is rounded.
    pub scale_rounding: ScaleRounding,
}

impl DelayedRule {
    /// The same rule with another margin.
    pub fn with_margin(self, margin: i32) -> Self {
        Self { margin, ..self }
    }

    /// The same rule with another reduction of the history.
    pub fn with_amax_compute(self, amax_compute: AmaxCompute) -> Self {
        Self {
            amax_compute,
            ..self
        }
    }

    /// The same rule with another rounding of the quant_scale.
    pub fn with_scale_rounding(self, scale_rounding: ScaleRounding) -> Self {
        Self {
            scale_rounding,
            ..self
        }
    }

    /// The quant_scale for an amax reduced from the history.
    fn scale(&self, format: Format, reduced: f32, previous: f32) -> f32 {
        if reduced > 0.0 && reduced.is_finite() {
            let exact = delayed_quant_scale(reduced, format, self.margin, previous);
            self.scale_rounding.apply(exact)
        } else {
            // Bit for bit, without another rounding.
            previous
        }
    }
}

/// What [`update_slot`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotUpdate {
    /// Nothing was recorded (amax 0): history and quant_scale are as they were.
    Unused,
    /// The history was rolled and the quant_scale recomputed.
    Updated,
    /// The amax was infinite or NaN: history and quant_scale are as they were. The caller counts and reports it.
    NonFinite,
}

/// One delayed-scaling update at the end of a step that recorded `amax`.
///
/// The amax becomes `history[0]`, the oldest entry is dropped, and the quant_scale of the next step is made from the
/// history by [`delayed_quant_scale`] and [`ScaleRounding`]; it and its reciprocal are finite and not 0. Transformer
/// Engine also stores a non-finite amax, which then freezes the scale for as long as it stays in the window; here it is
/// only reported.
///
/// ```
/// use fp8_core::{DelayedRule, Format, SlotUpdate, update_slot};
/// let (mut history, mut quant_scale) = ([1.0, 0.0, 0.0], 448.0);
/// let update = update_slot(&DelayedRule::default(), Format::E4M3, 2.0, &mut history, &mut quant_scale);
/// assert_eq!(update, SlotUpdate::Updated);
/// assert_eq!((history, quant_scale), ([2.0, 1.0, 0.0], 224.0));
/// ```
pub fn update_slot(
    rule: &DelayedRule,
    format: Format,
    amax: f32,
    history: &mut [f32],
    quant_scale: &mut f32,
) -> SlotUpdate {
    if !amax.is_finite() {
        return SlotUpdate::NonFinite;
    }
    if amax <= 0.0 {
        return SlotUpdate::Unused;
    }
    let reduced = if history.is_empty() {
        rule.amax_compute.reduce(&[amax])
    } else {
        history.rotate_right(1);
        history[0] = amax;
        rule.amax_compute.reduce(history)
    };
    *quant_scale = rule.scale(format, reduced, *quant_scale);
    SlotUpdate::Updated
}

/// The quant_scale for `format` from `history` with nothing new recorded: needed when the format changes.
///
/// An empty history (all 0) gives 1, the initial scale, since `previous` was for another format. If the history is not
/// empty but reduces to 0, infinity or NaN, `previous` stays.
///
/// ```
/// use fp8_core::{DelayedRule, Format, remake_scale};
/// let history = [2.0, 1.0, 0.0];
/// assert_eq!(remake_scale(&DelayedRule::default(), Format::E4M3, &history, 1.0), 224.0);
/// assert_eq!(remake_scale(&DelayedRule::default(), Format::E5M2, &history, 1.0), 28672.0);
/// ```
pub fn remake_scale(rule: &DelayedRule, format: Format, history: &[f32], previous: f32) -> f32 {
    if history.iter().all(|&amax| amax == 0.0) {
        return 1.0;
    }
    rule.scale(format, rule.amax_compute.reduce(history), previous)
}

/// `history` with `len` entries: the newest are kept, and new entries after the oldest are 0.
///
/// ```
/// use fp8_core::resize_history;
/// assert_eq!(resize_history(&[3.0, 2.0, 1.0], 2), [3.0, 2.0]);
/// assert_eq!(resize_history(&[3.0], 3), [3.0, 0.0, 0.0]);
/// ```
pub fn resize_history(history: &[f32], len: usize) -> Vec<f32> {
    let mut resized = history[..len.min(history.len())].to_vec();
    resized.resize(len, 0.0);
    resized
}
