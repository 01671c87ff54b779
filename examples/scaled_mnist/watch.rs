//! A record of a scaled run: the scales of every layer, and how much of its data is out of range.

use candle_core::DType;
use fp8::Format;
use fp8::scaled::{Scaled, ScaledDType};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// An operand of a layer's products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Input,
    Weight,
    Gradient,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::Gradient => "gradient",
        })
    }
}

/// One tensor at one step.
#[derive(Debug, Clone, Copy)]
struct Seen {
    step: u64,
    /// Base-2 logarithm of the scale.
    exponent: i32,
    over: f64,
    under: f64,
}

/// A layer and its points: step and base-2 logarithm of the scale.
pub type Curve = (String, Vec<(f64, f64)>);

type ByTensor = BTreeMap<(usize, Kind), Vec<Seen>>;

/// All records, by layer and kind. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Watch(Arc<Mutex<ByTensor>>);

impl Watch {
    /// Records the scale of `x` and how much of it is out of range in the format of the product: FP8 if `fp8`, else f16.
    pub fn note(
        &self,
        step: u64,
        (layer, kind): (usize, Kind),
        fp8: bool,
        x: &Scaled,
    ) -> fp8::scaled::Result<()> {
        let dtype = match (fp8, kind) {
            (false, _) => ScaledDType::Float(DType::F16),
            (true, Kind::Gradient) => ScaledDType::Fp8(Format::E5M2),
            (true, _) => ScaledDType::Fp8(Format::E4M3),
        };
        let outside = x.out_of_range(dtype)?;
        let Some(exponent) = x.scale().exponent() else {
            return Ok(()); // Zeros, such as biases before the first step.
        };
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry((layer, kind)).or_default().push(Seen {
            step,
            exponent,
            over: outside.over,
            under: outside.under,
        });
        Ok(())
    }

    /// The mean share of elements outside the normal range; 0 without records.
    pub fn out_of_range(&self) -> f64 {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shares: Vec<f64> = seen
            .values()
            .flatten()
            .map(|seen| seen.over + seen.under)
            .collect();
        shares.iter().sum::<f64>() / shares.len().max(1) as f64
    }

    /// For each kind, the curves (step, exponent) of all layers.
    pub fn panels(&self) -> Vec<(String, Vec<Curve>)> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let panel = |kind: Kind| {
            let of_kind = seen.iter().filter(|((_, of), _)| *of == kind);
            let curves = of_kind.map(|((layer, _), seen)| {
                let points = seen.iter();
                let points = points.map(|seen| (seen.step as f64, f64::from(seen.exponent)));
                (format!("layers.{layer}"), points.collect())
            });
            (kind.to_string(), curves.collect())
        };
        [Kind::Input, Kind::Weight, Kind::Gradient]
            .map(panel)
            .into()
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "{:20} {:>7} {:>14} {:>10} {:>10}",
            "tensor", "scale", "from .. to", "over", "under"
        )?;
        for ((layer, kind), seen) in seen.iter() {
            let last = seen.last().map_or(0, |seen| seen.exponent);
            let least = seen.iter().map(|seen| seen.exponent).min().unwrap_or(0);
            let most = seen.iter().map(|seen| seen.exponent).max().unwrap_or(0);
            let mean = |of: fn(&Seen) -> f64| seen.iter().map(of).sum::<f64>() / seen.len() as f64;
            writeln!(
                f,
                "{:20} {:>7} {:>14} {:>9.3}% {:>9.3}%",
                format!("layers.{layer} {kind}"),
                format!("2^{last}"),
                format!("2^{least} .. 2^{most}"),
                100. * mean(|seen| seen.over),
                100. * mean(|seen| seen.under),
            )?;
        }
        Ok(())
    }
}
