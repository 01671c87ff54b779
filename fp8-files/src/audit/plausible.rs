//! Whether weights are of a size that networks have.
//!
//! A linear layer of a trained network has outputs about as large as its inputs, so the *gain* of its weight, its root mean square times the
//! square root of its number of inputs, is about 1: between 0.1 and 5 in language models, up to 60 in T5, 0.03 in fresh small models. Inverted scales, and
//! scales that are off by the largest value of the format, give gains that are hundreds or millions of times larger or smaller.

use super::fault::Fault;
use super::report::Finding;
use super::scales::Numbers;
use std::collections::HashMap;

/// Gains beyond those of any layer.
const TOO_LARGE: f64 = 150.;
const TOO_SMALL: f64 = 0.012;
/// The factor by which a layer may differ from others of its kind.
const UNLIKE: f64 = 50.;
/// Gains at which such a layer is suspicious.
const LARGE: f64 = 25.;
const SMALL: f64 = 0.02;
/// Without codes: the assumed ratio of the largest weight under a scale to the root mean square of all.
const PEAK: f64 = 5.;
/// The largest values of E4M3 and of FNUZ.
const LARGEST: [f64; 2] = [448., 240.];
/// Scales of this many in one tensor: how far its largest one may be from the median.
const SPIKE: f32 = 200.;

/// A layer with its weights' size.
pub(super) struct Sized<'a> {
    /// The stored name of the scale.
    pub(super) name: &'a str,
    /// What layers of the same kind share.
    pub(super) role: &'a str,
    pub(super) numbers: &'a Numbers,
    /// Root mean square of the weights, if codes were read.
    pub(super) rms: Option<f64>,
    /// Whether codes were read and are all 0.
    pub(super) is_zero: bool,
    /// Input features.
    pub(super) inputs: usize,
}

impl Sized<'_> {
    fn gain(&self) -> Option<f64> {
        if self.is_zero {
            return None;
        }
        let estimated = || Some(f64::from(self.numbers.median?) * LARGEST[0] / PEAK);
        Some(self.rms.or_else(estimated)? * (self.inputs as f64).sqrt())
    }

    /// Faults of the scale that explain its gain, with the gain of the repaired layer.
    fn causes(&self, gain: f64) -> Vec<(Fault, f64)> {
        let Some(median) = self.numbers.median else {
            return vec![];
        };
        let with = |scale: f64| gain / f64::from(median) * scale;
        let median = f64::from(median);
        let mut causes = vec![(Fault::ScalesInverted, with(1. / median))];
        if self.numbers.all_bytes() {
            causes.push((Fault::E8m0AsFloat, with((median - 127.).exp2())));
        }
        for largest in LARGEST {
            causes.push((Fault::ScalesTooLarge, gain / largest));
            causes.push((Fault::ScalesTooSmall, gain * largest));
        }
        causes
    }
}

/// The faults of all layers' scales together.
pub(super) fn findings(layers: &[Sized<'_>]) -> Vec<Finding> {
    let gains: Vec<Option<f64>> = layers.iter().map(Sized::gain).collect();
    let mut of_role: HashMap<&str, Vec<f64>> = HashMap::new();
    for (layer, gain) in layers.iter().zip(&gains) {
        of_role.entry(layer.role).or_default().extend(gain);
    }
    let all = median(gains.iter().flatten().copied().collect());
    let of_role: HashMap<&str, f64> = of_role
        .into_iter()
        .filter(|(_, gains)| gains.len() >= 4)
        .filter_map(|(role, gains)| Some((role, median(gains)?)))
        .collect();
    let mut found = vec![];
    for (layer, gain) in layers.iter().zip(gains) {
        let (Some(gain), Some(all)) = (gain, all) else {
            continue;
        };
        let typical = of_role.get(layer.role).copied().unwrap_or(all);
        let before = found.len();
        found.extend(of_layer(layer, gain, typical));
        if found.len() == before {
            found.extend(spike(layer));
        }
    }
    found
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn of_layer(layer: &Sized<'_>, gain: f64, typical: f64) -> Option<Finding> {
    let is_typical = (TOO_SMALL..=TOO_LARGE).contains(&typical);
    let is_impossible = !(TOO_SMALL..=TOO_LARGE).contains(&gain);
    let ratio = gain / typical;
    let is_unlike =
        is_typical && ((ratio > UNLIKE && gain > LARGE) || (ratio < 1. / UNLIKE && gain < SMALL));
    if !is_impossible && !is_unlike {
        return None;
    }
    let scale = layer.numbers.median?;
    let found = format!(
        "{scale:.3e} (median): weights up to about {:.3e}",
        f64::from(scale) * LARGEST[0]
    );
    let expected = match is_typical {
        true => format!("about {:.1e}, as in other layers", f64::from(scale) / ratio),
        false => "amax / 448, usually 1e-5 to 1e-2".to_string(),
    };
    let new = |fault| {
        Some(Finding::new(
            fault,
            layer.name,
            found.clone(),
            expected.clone(),
        ))
    };
    if layer.numbers.all_one() && gain > 1. {
        return new(Fault::ScalesOne);
    }
    // The cause is the fault whose repair makes the layer most like the others, or like layers of any network.
    let target = if is_typical { typical } else { 1. };
    let distance = |gain: f64| (gain / target).ln().abs();
    let near = if is_typical { 10f64 } else { 60. };
    let causes = layer.causes(gain).into_iter();
    let causes = causes.filter(|(_, gain)| distance(*gain) < near.ln());
    let cause = causes.min_by(|(_, a), (_, b)| distance(*a).total_cmp(&distance(*b)));
    match cause {
        Some((fault, _)) => new(fault),
        // Layers that hardly do anything occur.
        None if gain < typical && is_typical => None,
        None if is_typical => new(Fault::ScaleOutlier),
        None => new(Fault::ScalesImplausible),
    }
}

/// A single scale far above the others of its tensor.
fn spike(layer: &Sized<'_>) -> Option<Finding> {
    let median = layer.numbers.median?;
    let (index, largest) = layer.numbers.largest;
    let weight = f64::from(largest) * LARGEST[0];
    if largest / median <= SPIKE || weight <= LARGE {
        return None;
    }
    let found = format!("{largest:.3e} at index {index}: weights up to {weight:.3e}");
    let expected = format!("about {median:.3e}, the median of {}", layer.numbers.count);
    Some(Finding::new(
        Fault::ScaleOutlier,
        layer.name,
        found,
        expected,
    ))
}

/// Whether static input scales with this median give activations of an implausible size: norms make inputs of about 1 to 50.
pub(super) fn are_inputs_implausible(median: f32) -> bool {
    let amax = f64::from(median) * LARGEST[0];
    !(0.05..=5000.).contains(&amax)
}
