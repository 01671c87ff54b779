//! The quantities that drawings show.

/// A quantity that [`StatsCurves`](super::StatsCurves) draws over the steps.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{StatsCurves, StatsQuantity};
/// let curves = StatsCurves::default();
/// let files = StatsQuantity::ALL.map(|quantity| (format!("{}.svg", quantity.name()), curves.to_svg(quantity)));
/// assert_eq!(files[4].0, "sqnr.svg");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatsQuantity {
    /// Largest magnitude.
    Amax,
    /// Largest quant_scale.
    QuantScale,
    /// Share of the elements beyond the format's range, in percent.
    Overflow,
    /// Share of the elements that became 0, in percent.
    Underflow,
    /// Signal to quantization noise, in dB.
    Sqnr,
}

// The title of a drawing and the name of its file.
names! { pub StatsQuantity::name, pub ALL:
    Amax = "amax",
    QuantScale = "quant_scale",
    Overflow = "overflow",
    Underflow = "underflow",
    Sqnr = "sqnr",
}

impl StatsQuantity {
    /// The field of a row in a log.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Amax => "amax",
            Self::QuantScale => "quant_scale_max",
            Self::Overflow => "saturated_share",
            Self::Underflow => "underflowed_share",
            Self::Sqnr => "sqnr_db",
        }
    }

    /// The unit of the values beside a drawing; empty for powers of ten.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Amax | Self::QuantScale => "",
            Self::Overflow | Self::Underflow => "%",
            Self::Sqnr => "dB",
        }
    }

    /// Whether the axis is logarithmic.
    pub(super) fn is_logarithmic(self) -> bool {
        matches!(self, Self::Amax | Self::QuantScale)
    }

    /// The lower end of the axis, if it is fixed.
    pub(super) fn least(self) -> Option<f64> {
        matches!(self, Self::Overflow | Self::Underflow).then_some(0.)
    }

    /// The height at which a value is drawn; None for values without one, such as the logarithm of 0.
    pub(super) fn height(self, value: f64) -> Option<f64> {
        let height = match self {
            Self::Amax | Self::QuantScale => value.log10(),
            Self::Overflow | Self::Underflow => 100. * value,
            Self::Sqnr => value,
        };
        height.is_finite().then_some(height)
    }

    /// Which lines are named, as a note in the drawing.
    pub(super) fn worst_is(self) -> &'static str {
        match self {
            Self::Amax | Self::QuantScale => "named: those that move most (largest / least)",
            Self::Overflow | Self::Underflow => "named: the largest",
            Self::Sqnr => "named: the lowest",
        }
    }

    /// How bad a line with these points is: larger is worse.
    pub(super) fn badness(self, points: &[(f64, f64)]) -> f64 {
        let heights = || points.iter().map(|point| point.1);
        let largest = || heights().fold(f64::NEG_INFINITY, f64::max);
        let least = || heights().fold(f64::INFINITY, f64::min);
        match self {
            Self::Amax | Self::QuantScale => largest() - least(),
            Self::Overflow | Self::Underflow => largest(),
            Self::Sqnr => -least(),
        }
    }

    /// The text of the value behind `badness`.
    pub(super) fn worst_value(self, badness: f64) -> String {
        match self {
            Self::Amax | Self::QuantScale => format!("\u{d7}{}", three_digits(10f64.powf(badness))),
            Self::Overflow | Self::Underflow => format!("{} %", three_digits(badness)),
            Self::Sqnr => format!("{badness:.1} dB", badness = -badness),
        }
    }
}

/// A number with few digits.
fn three_digits(value: f64) -> String {
    match value {
        0. => "0".to_string(),
        10.0..10_000.0 => format!("{value:.0}"),
        1.0..10.0 => format!("{value:.1}"),
        0.01..1.0 => format!("{value:.2}"),
        _ => format!("{value:.0e}"),
    }
}
