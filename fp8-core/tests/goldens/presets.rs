//! Delayed scaling against what flax, fp8layers and IPEX remember after each step.

use fp8_core::{
    AmaxCompute, CustomAmax, DelayedRule, Format, HistoryOrder, ScaleRounding, SlotUpdate,
    reciprocal, remake_scale, update_slot,
};
use serde_json::Value;

fn numbers(list: &Value) -> Vec<f32> {
    let list = list.as_array().unwrap();
    list.iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

struct Trace {
    name: String,
    peer: String,
    length: usize,
    format: Format,
    amaxes: Vec<f32>,
    dequant_scales: Vec<f32>,
    /// After each step, or after the last one only.
    histories: Vec<Vec<f32>>,
}

impl Trace {
    /// The history after step `t`, where it is stored.
    fn history(&self, t: usize) -> Option<&[f32]> {
        let missing = self.amaxes.len() - self.histories.len();
        t.checked_sub(missing).map(|i| self.histories[i].as_slice())
    }

    fn rule(&self) -> DelayedRule {
        DelayedRule::default().with_scale_rounding(match self.peer.as_str() {
            "flax" => ScaleRounding::Exact,
            _ => ScaleRounding::PowerOfTwo,
        })
    }

    fn order(&self) -> HistoryOrder {
        match self.peer.as_str() {
            "ipex" => HistoryOrder::RingInProgress,
            _ => HistoryOrder::Ring,
        }
    }
}

fn traces() -> Vec<Trace> {
    let file: Value =
        serde_json::from_slice(&crate::common::golden("delayed_presets.json")).unwrap();
    let traces = file["traces"].as_array().unwrap();
    let trace = |trace: &Value| {
        let text = |key: &str| trace[key].as_str().unwrap().to_string();
        let histories = trace["histories"].as_array().unwrap();
        Trace {
            name: format!("{} {} {}", trace["peer"], trace["length"], trace["format"]),
            peer: text("peer"),
            length: trace["length"].as_u64().unwrap() as usize,
            format: text("format").parse().unwrap(),
            amaxes: numbers(&file["amaxes"][text("amaxes")]),
            dequant_scales: numbers(&trace["dequant_scales"]),
            histories: histories.iter().map(numbers).collect(),
        }
    };
    traces.iter().map(trace).collect()
}

/// flax computes the scale of a step from the history at its start and stores it with the history at its end. So its scale after
/// a step is the one used in the step, ours before it. The others store the scale of the next step, as we do.
#[test]
fn each_step_leaves_what_the_peers_remember() {
    let traces = traces();
    assert_eq!(traces.len(), 14);
    let mut compared = 0;
    for trace in &traces {
        assert_eq!(trace.dequant_scales.len(), trace.amaxes.len());
        let (rule, order) = (trace.rule(), trace.order());
        let (mut history, mut quant_scale) = (vec![0.; trace.length], 1.);
        for (t, &amax) in trace.amaxes.iter().enumerate() {
            let name = format!("{} step {t}", trace.name);
            let cast_with = reciprocal(quant_scale);
            let update = update_slot(&rule, trace.format, amax, &mut history, &mut quant_scale);
            assert_eq!(update, SlotUpdate::Updated, "{name}");
            let stored = match trace.peer.as_str() {
                "flax" => cast_with,
                _ => reciprocal(quant_scale),
            };
            assert_eq!(stored, trace.dequant_scales[t], "{name}");
            if let Some(theirs) = trace.history(t) {
                assert_eq!(order.from_newest_first(&history), theirs, "{name}");
                compared += 1;
            }
        }
    }
    // Ten traces store the history after each of 60 steps, four after the last one only.
    assert_eq!(compared, 10 * 60 + 4);
}

/// State imported from another library after any step continues as in that library.
#[test]
fn a_run_goes_on_from_the_state_of_a_peer() {
    let mut compared = 0;
    for trace in &traces() {
        let rule = trace.rule();
        for t in 0..trace.amaxes.len() - 1 {
            let Some(theirs) = trace.history(t) else {
                continue;
            };
            let stored = reciprocal(trace.dequant_scales[t]);
            let history = trace.order().to_newest_first(theirs);
            let next = match trace.peer.as_str() {
                "flax" => remake_scale(&rule, trace.format, &history, stored),
                _ => stored,
            };
            let expected = trace.dequant_scales[t + usize::from(trace.peer == "flax")];
            assert_eq!(reciprocal(next), expected, "{} step {t}", trace.name);
            let (mut history, mut quant_scale) = (history, next);
            let amax = trace.amaxes[t + 1];
            update_slot(&rule, trace.format, amax, &mut history, &mut quant_scale);
            if let Some(theirs) = trace.history(t + 1) {
                let ours = trace.order().from_newest_first(&history);
                assert_eq!(ours, theirs, "{} step {t}", trace.name);
                compared += 1;
            }
        }
    }
    // From each but the last step of the traces that store all histories.
    assert_eq!(compared, 10 * 59);
}

/// The peers of the power-of-two rules take a logarithm in f32, which rounds up just below a power of two.
#[test]
fn just_below_a_power_of_two_ours_is_the_floor() {
    // 448 / amax is 8 less one ulp.
    let amax = f32::from_bits(56f32.to_bits() + 1);
    let quotient = 448. / amax;
    assert_eq!(quotient.to_bits(), 8f32.to_bits() - 1);
    let theirs = f64::from(quotient).log2() as f32;
    assert_eq!(theirs.floor(), 3.);
    let rule = DelayedRule::default().with_scale_rounding(ScaleRounding::PowerOfTwo);
    let (mut history, mut quant_scale) = ([0.; 16], 1.);
    update_slot(&rule, Format::E4M3, amax, &mut history, &mut quant_scale);
    assert_eq!(quant_scale, 4.);
    // With their scale nothing saturates either: the excess is rounded away.
    let cast = fp8_core::Cast::new(Format::E4M3).with_overflow(fp8_core::Overflow::NonFinite);
    assert_eq!(Format::E4M3.decode(cast.encode(8. * amax, 0)), 448.);
}

/// For a tensor of zeros flax and the others push 0 and forget an older amax. Here nothing changes, as in Transformer Engine's
/// fused update.
#[test]
fn an_amax_of_zero_rolls_nothing() {
    for trace in traces() {
        let (mut history, mut quant_scale) = (vec![2.; trace.length], 64.);
        let update = update_slot(
            &trace.rule(),
            trace.format,
            0.,
            &mut history,
            &mut quant_scale,
        );
        assert_eq!(update, SlotUpdate::Unused);
        assert_eq!((history, quant_scale), (vec![2.; trace.length], 64.));
    }
}

/// A user's reduction gets the newest amax first, under each rule.
#[test]
fn a_custom_reduction_works_under_every_rule() {
    let second = CustomAmax::new("second_largest", |history: &[f32]| {
        let mut sorted = history.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted.get(1).copied().unwrap_or(0.)
    });
    for trace in traces() {
        let rule = trace
            .rule()
            .with_amax_compute(AmaxCompute::Custom(second.clone()));
        let (mut history, mut quant_scale) = (vec![0.; trace.length], 1.);
        for (t, &amax) in trace.amaxes.iter().enumerate().take(100) {
            let before = quant_scale;
            update_slot(&rule, trace.format, amax, &mut history, &mut quant_scale);
            let from = (t + 1).saturating_sub(trace.length);
            let mut window = trace.amaxes[from..=t].to_vec();
            window.sort_by(|a, b| b.total_cmp(a));
            let expected = match window.get(1) {
                None => before,
                Some(&amax) => rule.scale_rounding.apply(trace.format.max() / amax),
            };
            assert_eq!(quant_scale, expected, "{} step {t}", trace.name);
        }
    }
}

#[test]
fn orders_give_back_what_they_got() {
    for len in 0..6 {
        let history: Vec<f32> = (0..len).map(|i| 10. - i as f32).collect();
        let ring = HistoryOrder::Ring.from_newest_first(&history);
        assert_eq!(HistoryOrder::Ring.to_newest_first(&ring), history);
        let stored = HistoryOrder::RingInProgress.from_newest_first(&history);
        let mut kept = history;
        if let Some(oldest) = kept.last_mut() {
            *oldest = 0.;
        }
        assert_eq!(HistoryOrder::RingInProgress.to_newest_first(&stored), kept);
    }
}
