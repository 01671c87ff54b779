//! `prepare_fp8`, how models show their layers, the cast counter, `check_gradients` and the drop-in layers.

mod counts;
mod drop_in;
mod models;
mod report;
mod shared_weights;

use candle_core::DType;
use candle_nn::{VarBuilder, VarMap};
use fp8::{Outcome, PrepareReport};
use fp8_test_support::{Mlp, device, fill};

/// The path of each layer and its outcome: `fp8`, or the reason why it was skipped.
pub fn outcomes(report: &PrepareReport) -> Vec<(String, String)> {
    let text = |outcome: &Outcome| match outcome {
        Outcome::Converted(notes) => {
            let notes = notes.iter().map(|note| format!(": {note}"));
            format!("fp8{}", notes.collect::<String>())
        }
        Outcome::Skipped(reason) => reason.to_string(),
        other => panic!("{other:?}"),
    };
    report
        .layers
        .iter()
        .map(|l| (l.path.clone().unwrap_or_default(), text(&l.outcome)))
        .collect()
}

#[track_caller]
pub fn assert_outcomes(case: &str, report: &PrepareReport, expected: &[(&str, &str)]) {
    let expected: Vec<_> = expected
        .iter()
        .map(|(path, text)| (path.to_string(), text.to_string()))
        .collect();
    assert_eq!(outcomes(report), expected, "{case}:\n{report}");
}

pub fn new_mlp(seed: u64) -> (VarMap, Mlp) {
    let vars = VarMap::new();
    let mlp = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, seed);
    (vars, mlp)
}
