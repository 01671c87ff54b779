//! Delayed scaling against Transformer Engine's fused update (`fused_*` of the traces).

use fp8_core::{AmaxCompute, DelayedRule, Format, SlotUpdate, update_slot};
use serde_json::Value;

/// Numbers are stored as strings, to keep infinities and NaN.
fn number(value: &Value) -> f32 {
    value.as_str().unwrap().parse().unwrap()
}

/// Transformer Engine keeps slot 0 for the step in progress and appends at the end; ours begins with the newest and has
/// no empty slot, so it holds one step more.
fn their_history(ours: &[f32]) -> Vec<f32> {
    let recorded = &ours[..ours.len() - 1];
    std::iter::once(0.0)
        .chain(recorded.iter().rev().copied())
        .collect()
}

#[test]
fn traces_equal_transformer_engine() {
    let traces: Vec<Value> =
        serde_json::from_slice(&crate::common::golden("te_delayed.json")).unwrap();
    assert_eq!(traces.len(), 40);
    for trace in &traces {
        let len = trace["len"].as_u64().unwrap() as usize;
        let format = if trace["fp8_max"] == 448.0 {
            Format::E4M3
        } else {
            Format::E5M2
        };
        let algo = trace["algo"].as_str().unwrap();
        let rule = DelayedRule::default()
            .with_margin(trace["margin"].as_i64().unwrap() as i32)
            .with_amax_compute(algo.parse::<AmaxCompute>().unwrap());
        let name = format!("{} {} {len} {format}", trace["seq"], trace["algo"]);
        let (mut history, mut quant_scale) = (vec![0.0; len], 1.0);
        let mut diverged = false;
        for (step, entry) in trace["trace"].as_array().unwrap().iter().enumerate() {
            let amax = number(&entry["amax"]);
            let before = (history.clone(), quant_scale);
            let update = update_slot(&rule, format, amax, &mut history, &mut quant_scale);
            if !amax.is_finite() {
                // The deliberate difference: theirs stores it, which freezes or distorts the scale until it has left
                // the window; ours reports it and keeps everything.
                assert_eq!(update, SlotUpdate::NonFinite, "{name} step {step}");
                assert_eq!((history.clone(), quant_scale), before, "{name} step {step}");
                assert_eq!(
                    quant_scale,
                    number(&entry["fused_scale"]),
                    "{name} step {step}"
                );
                diverged = true;
                continue;
            }
            let expected = if amax == 0.0 {
                SlotUpdate::Unused
            } else {
                SlotUpdate::Updated
            };
            assert_eq!(update, expected, "{name} step {step}");
            let theirs: Vec<f32> = entry["fused_hist"]
                .as_array()
                .unwrap()
                .iter()
                .map(number)
                .collect();
            if !diverged {
                assert_eq!(
                    quant_scale,
                    number(&entry["fused_scale"]),
                    "{name} step {step}"
                );
                assert_eq!(their_history(&history), theirs, "{name} step {step}");
            } else {
                // From here on the expected scale is that of the finite amaxes.
                let reduced = rule.amax_compute.reduce(&history);
                assert_eq!(
                    quant_scale,
                    format.max() / 2f32.powi(rule.margin) / reduced,
                    "{name} step {step}"
                );
                assert!(
                    history.iter().all(|amax| amax.is_finite()),
                    "{name} step {step}"
                );
            }
        }
        if diverged {
            // Once theirs has forgotten the amax, both agree again.
            let last = trace["trace"].as_array().unwrap().last().unwrap();
            assert_eq!(quant_scale, number(&last["fused_scale"]), "{name}");
        }
    }
}
