//! All FP8 weights: their scales and codes, read by as many threads as the folder takes.

use super::codes::CodeStats;
use super::fault::Fault;
use super::options::{AuditOptions, Codes};
use super::plausible::{self, Sized};
use super::report::Finding;
use super::scales::{self, Numbers};
use crate::load::survey::{Layer, Survey};
use fp8_candle::InputScaling;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that read at the same time.
const LOCAL_READERS: usize = 4;
const REMOTE_READERS: usize = 8;
/// Bytes that are read of one scale on a server; only those of small groups have more.
const REMOTE_MOST: usize = 1 << 20;

/// What was read of a layer.
#[derive(Default)]
struct Facts {
    scale: Option<Numbers>,
    codes: Option<CodeStats>,
    /// The static scale of its inputs.
    input: Option<f32>,
    bytes_read: u64,
    faults: Vec<Finding>,
}

/// The findings of all layers, and the bytes that were read.
pub(super) fn findings(
    survey: &Survey,
    options: &AuditOptions,
    is_remote: bool,
) -> (Vec<Finding>, u64) {
    let layers: Vec<Layer<'_>> = survey.layers().collect();
    let mut facts = read_all(&layers, options.codes, is_remote);
    let bytes_read = facts.iter().map(|facts| facts.bytes_read).sum();
    let mut found: Vec<Finding> = facts
        .iter_mut()
        .flat_map(|facts| facts.faults.drain(..))
        .collect();
    let both = || layers.iter().zip(&facts);
    let sized: Vec<Sized<'_>> = both()
        .filter_map(|(layer, facts)| {
            Some(Sized {
                name: layer.scale?.name,
                role: layer.role(),
                numbers: facts.scale.as_ref()?,
                rms: facts.codes.as_ref().and_then(CodeStats::rms),
                is_zero: facts
                    .codes
                    .as_ref()
                    .is_some_and(|codes| codes.zeros == codes.count),
                inputs: layer.shape[1],
            })
        })
        .collect();
    found.extend(plausible::findings(&sized));
    let coded: Vec<_> = both()
        .filter_map(|(layer, facts)| Some((layer, facts.codes.as_ref()?, facts.scale.as_ref())))
        .collect();
    found.extend(of_codes(&coded));
    let inputs: Vec<(&Layer<'_>, f32)> = both()
        .filter_map(|(layer, facts)| Some((layer, facts.input?)))
        .collect();
    if !survey.may_ignore_input_scales() {
        found.extend(of_inputs(&inputs));
    }
    if is_ue8m0(survey) {
        found.extend(both().filter_map(|(layer, facts)| {
            let (numbers, scale) = (facts.scale.as_ref()?, layer.scale?);
            let (index, value) = numbers.not_power_of_two?;
            let text = format!("{value:e} at index {index}");
            Some(Finding::new(
                Fault::NotPowersOfTwo,
                scale.name,
                text,
                "powers of two",
            ))
        }));
    }
    (found, bytes_read)
}

/// Whether the configuration says that scales are powers of two.
fn is_ue8m0(survey: &Survey) -> bool {
    let config = survey.config.as_ref();
    let places = [
        "/quantization_config/scale_fmt",
        "/text_config/quantization_config/scale_fmt",
    ];
    let said = |place: &&str| config?.pointer(place)?.as_str();
    places.iter().filter_map(said).any(|said| said == "ue8m0")
}

fn read_all(layers: &[Layer<'_>], codes: Codes, is_remote: bool) -> Vec<Facts> {
    let (readers, most) = match is_remote {
        true => (REMOTE_READERS, REMOTE_MOST),
        false => (LOCAL_READERS, usize::MAX),
    };
    let next = AtomicUsize::new(0);
    let all: Mutex<BTreeMap<usize, Facts>> = Mutex::default();
    let work = || {
        while let at = next.fetch_add(1, Ordering::Relaxed)
            && let Some(layer) = layers.get(at)
        {
            let facts = read(layer, codes, most);
            let mut all = all.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            all.insert(at, facts);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..readers.min(layers.len()) {
            scope.spawn(work);
        }
        work();
    });
    let all = all
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    all.into_values().collect()
}

fn read(layer: &Layer<'_>, codes: Codes, most: usize) -> Facts {
    let mut facts = Facts::default();
    if let Some(tensor) = layer.scale
        && let Some(numbers) = Numbers::read(tensor, most)
    {
        scales::check(tensor, &numbers, &mut facts.faults);
        scales::check_padding(layer, &numbers, &mut facts.faults);
        facts.bytes_read += numbers.bytes_read;
        facts.scale = Some(numbers);
    }
    facts.codes = CodeStats::read(layer, facts.scale.as_ref(), codes);
    facts.bytes_read += facts.codes.as_ref().map_or(0, |codes| codes.bytes_read);
    if let (Some(numbers), Some(tensor)) = (&mut facts.scale, layer.scale) {
        numbers.forget();
        zeros(
            tensor.name,
            numbers,
            facts.codes.as_ref(),
            &mut facts.faults,
        );
    }
    if let (Some(tensor), InputScaling::Static(())) = (layer.input_scale, layer.inputs)
        && let Some(numbers) = Numbers::read(tensor, most)
    {
        scales::check(tensor, &numbers, &mut facts.faults);
        facts.bytes_read += numbers.bytes_read;
        facts.input = (numbers.count > 0).then_some(numbers.first);
        if facts.input == Some(0.) {
            let expected = "a positive number";
            facts
                .faults
                .push(Finding::new(Fault::ScaleZero, tensor.name, "0", expected));
        }
    }
    facts
}

/// Scales of 0: where all codes are 0 they are valid. Without codes only many of them are suspicious.
fn zeros(name: &str, numbers: &Numbers, codes: Option<&CodeStats>, faults: &mut Vec<Finding>) {
    let count = numbers.zeros;
    let used = codes.and_then(|codes| codes.used_zero);
    let is_many = 2 * count > numbers.count && codes.is_none();
    if used.is_none() && !is_many {
        return;
    }
    let at = used.map_or(String::new(), |index| format!(" at index {index}"));
    let found = format!("0{at}, {count} such of {}", numbers.count);
    let expected = "a positive number for codes other than 0";
    faults.push(Finding::new(Fault::ScaleZero, name, found, expected));
}

type Coded<'a> = (&'a Layer<'a>, &'a CodeStats, Option<&'a Numbers>);

fn of_codes(layers: &[Coded<'_>]) -> Vec<Finding> {
    let mut found = vec![];
    let with_nans = layers.iter().filter(|(_, codes, _)| codes.nans > 0).count();
    let negative_zeros: usize = layers
        .iter()
        .map(|(_, codes, _)| codes.negative_zeros)
        .sum();
    let zeros: usize = layers.iter().map(|(_, codes, _)| codes.zeros).sum();
    // In FNUZ 0 has no sign and 0x7F is the largest value, so most weights have one.
    let is_fnuz = 2 * with_nans > layers.len() && negative_zeros == 0 && zeros > 0;
    let short: Vec<Option<bool>> = layers.iter().map(|coded| is_short(coded)).collect();
    let judged = short.iter().flatten().count();
    let are_short = 2 * short.iter().flatten().filter(|short| **short).count() > judged;
    for ((layer, codes, _), short) in layers.iter().zip(short) {
        let mut add = |fault, text: String, expected: &str| {
            found.push(Finding::new(fault, layer.codes.name, text, expected));
        };
        if let Some(first) = codes.first_nan {
            let text = format!(
                "{} NaN of {} codes, the first at index {first}",
                codes.nans, codes.count
            );
            match is_fnuz {
                true => add(Fault::FnuzCodes, text + ", no negative zero", "E4M3 codes"),
                false => add(Fault::NanCodes, text, "finite codes"),
            }
        }
        let (share, usual) = (codes.saturated_share(), codes.usual_saturation(layer));
        if share > usual && codes.count > 64 {
            let text = format!("{:.1}% of the codes are +-448", 100. * share);
            let expected = format!("at most {:.1}%", 100. * usual);
            add(Fault::SaturatedCodes, text, &expected);
        }
        if codes.zeros == codes.count {
            let text = format!("{} codes, all 0", codes.count);
            add(Fault::ZeroWeights, text, "some weights");
        }
        // Layers that engines fuse may share the scale of the largest one, so only a majority of layers is evidence.
        if short == Some(true) && are_short && judged > 1 {
            let text = "the largest code of every scale is at most 240".to_string();
            add(Fault::UnusedRange, text, "448");
        }
    }
    found
}

fn is_short((_, codes, scale): &Coded<'_>) -> Option<bool> {
    let scale = (*scale)?;
    codes.is_short(scale.not_power_of_two.is_none())
}

fn of_inputs(inputs: &[(&Layer<'_>, f32)]) -> Vec<Finding> {
    let mut found = vec![];
    let scale = |layer: &Layer<'_>| {
        layer
            .input_scale
            .map_or("", |tensor| tensor.name)
            .to_string()
    };
    let mut values: Vec<f32> = inputs
        .iter()
        .map(|(_, value)| *value)
        .filter(|value| *value > 0.)
        .collect();
    values.sort_by(f32::total_cmp);
    let Some(median) = values.get(values.len() / 2).copied() else {
        return found;
    };
    let all_one = inputs.len() > 1 && inputs.iter().all(|(_, value)| *value == 1.);
    let implausible = plausible::are_inputs_implausible(median);
    for (layer, value) in inputs {
        let text = format!("{value:.3e}: inputs up to {:.3e}", value * 448.);
        if all_one {
            found.push(Finding::new(
                Fault::InputScalesOne,
                scale(layer),
                "1",
                "amax / 448",
            ));
        } else if implausible && plausible::are_inputs_implausible(*value) {
            let expected = "amax / 448, usually 0.001 to 1";
            found.push(Finding::new(
                Fault::InputScalesImplausible,
                scale(layer),
                text,
                expected,
            ));
        }
    }
    let mut shared: BTreeMap<(&str, usize), Vec<(&Layer<'_>, f32)>> = BTreeMap::new();
    for (layer, value) in inputs {
        let Some((parent, own)) = layer.path.rsplit_once('.') else {
            continue;
        };
        if let Some(at) = FUSED.iter().position(|parts| parts.contains(&own)) {
            shared
                .entry((parent, at))
                .or_default()
                .push((layer, *value));
        }
    }
    for members in shared.into_values() {
        let largest = members.iter().map(|(_, value)| *value).fold(0., f32::max);
        let differs = |value: f32| (largest - value).abs() > 1e-3 * largest;
        for (layer, value) in members.iter().filter(|(_, value)| differs(*value)) {
            let text = format!("{value:e}");
            let expected = format!("{largest:e}, as another layer with the same input");
            found.push(Finding::new(
                Fault::InputScalesDiffer,
                scale(layer),
                text,
                expected,
            ));
        }
    }
    found
}

/// Layers with one input, which engines fuse.
pub(super) const FUSED: [&[&str]; 3] = [
    &["q_proj", "k_proj", "v_proj"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
];
