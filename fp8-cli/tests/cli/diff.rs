//! `fp8 diff` of values that no ratio describes.

use crate::support::{Dir, json_output, output};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};

/// A tensor's name and values.
type Named<'a> = (&'a str, &'a [f32]);

fn write(path: &str, tensors: &[Named<'_>]) {
    let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
    let tensors = tensors.iter().map(|(name, values)| (*name, tensor(values)));
    let tensors: HashMap<&str, Tensor> = tensors.collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

/// A name, the values of both files and what is said of them.
static CASES: [(&str, &[f32], &[f32], &str); 8] = [
    ("equal", &[1., NAN, INF], &[1., NAN, INF], "equal"),
    ("near", &[3., 4.], &[3., 3.5], "20.00"),
    ("near_beside_inf", &[3., 4., INF], &[3., 3.5, INF], "20.00"),
    ("nan_in_a", &[1., NAN], &[1., 2.], "NaN in the first"),
    ("nan_in_b", &[1., 2.], &[NAN, 2.], "NaN in the second"),
    ("inf_in_b", &[1., 2.], &[1., INF], "Inf in the second"),
    ("shape", &[1., 2.], &[1., 2., 3.], "shapes [2] and [3]"),
    ("zero", &[0., 0.], &[0., 1e-3], "-inf"),
];

#[test]
fn nan_and_zeros_are_named_and_are_the_worst() {
    let dir = Dir::new();
    let (a, b) = (dir.join("a.safetensors"), dir.join("b.safetensors"));
    write(&a, &CASES.map(|case| (case.0, case.1)));
    write(&b, &CASES.map(|case| (case.0, case.2)));
    let report = json_output(&["diff", "--json", &a, &b]);
    let rows = report["tensors"].as_array().unwrap().iter();
    let text_of = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap().to_string();
    let verdicts: BTreeMap<String, String> = rows
        .map(|row| (text_of(row, "name"), text_of(row, "verdict")))
        .collect();
    for (name, _, _, verdict) in CASES {
        assert_eq!(verdicts[name], verdict, "{name}");
    }
    let text = output(&["diff", &a, &b]);
    let expected = "8 tensors in both, 1 of them equal; worst inf_in_b: Inf in the second";
    assert!(text.contains(expected), "{text}");
    // Where all values are finite, a tensor that was 0 is the worst.
    let finite = CASES.map(|case| (case.0, [case.1, case.2]));
    let finite = finite
        .into_iter()
        .filter(|case| ["near", "zero"].contains(&case.0));
    let [ones, others] = [0, 1].map(|side| {
        let of_side = finite.clone().map(|(name, values)| (name, values[side]));
        of_side.collect::<Vec<_>>()
    });
    write(&a, &ones);
    write(&b, &others);
    let text = output(&["diff", &a, &b]);
    assert!(text.contains("worst zero at -inf dB"), "{text}");
}
