//! The scaling-state table: updates, ranks, steps that fail, changes of the rule.

#[path = "common/row.rs"]
mod row;

use candle_core::Tensor;
use fp8_candle::state::{CalibrationRow, ReductionGroup, RowRule, SavedRow, StepCells};
use fp8_candle::{Error, Result, Role, Slot, StateTable};
use fp8_core::Contraction::Cols;
use fp8_core::{AmaxCompute, DelayedRule, Format, ScaleRounding};
use fp8_test_support::{device, flat, on_cuda};
use row::{Row, tensor};
use std::sync::{Arc, Mutex};

#[test]
fn zero_and_non_finite_amaxes_keep_history_and_scale() -> Result<()> {
    let row = Row::new("l", Role::Input, 3);
    row.record(3.5);
    row.update();
    let mut non_finite = 0;
    for recorded in [
        vec![0.],
        vec![f32::INFINITY],
        vec![f32::NAN],
        vec![f32::NAN, f32::INFINITY, f32::NAN],
        vec![0., f32::INFINITY],
    ] {
        non_finite += recorded.iter().filter(|amax| !amax.is_finite()).count() as u32;
        recorded.iter().for_each(|&amax| row.record(amax));
        row.update();
        assert_eq!(row.history(), [3.5, 0., 0.], "{recorded:?}");
        assert_eq!(row.scale(), 128., "{recorded:?}");
        assert_eq!(row.slot.non_finite_count()?, non_finite, "{recorded:?}");
        if !on_cuda() {
            assert_eq!(row.slot.version(), (1, 0), "{recorded:?}");
        }
    }
    // A finite amax next to a bad one counts.
    row.record(f32::INFINITY);
    row.record(7.);
    row.update();
    assert_eq!(row.history(), [7., 3.5, 0.]);
    assert_eq!(row.scale(), 64.);
    assert_eq!(row.slot.non_finite_count()?, non_finite + 1);
    let aborted = row.step();
    row.record(9.);
    aborted.abort();
    row.record(11.);
    row.update();
    assert_eq!(row.history(), [7., 3.5, 0.], "an aborted amax was used");
    Ok(())
}

#[test]
fn amaxes_merge_by_maximum_and_roll_once() {
    let row = Row::new("l", Role::Input, 3);
    for amax in [1., 3.5, 2.] {
        row.record(amax);
    }
    row.update();
    assert_eq!((row.history(), row.scale()), (vec![3.5, 0., 0.], 128.));
    assert_eq!(row.slot.version(), (1, 0));
    // Without anything new, nothing happens.
    row.update();
    assert_eq!(row.history(), [3.5, 0., 0.]);
}

/// A table of layers `a`, `b`, `c` with one input each.
fn three() -> (Arc<StateTable>, [Slot; 3]) {
    let table = StateTable::new(&device()).unwrap();
    let rows = ["a", "b", "c"].map(|path| (path, Role::Input));
    assert_eq!(table.add_rows(&rows, 2).unwrap(), 0);
    let slots = [0, 1, 2].map(|row| Slot::new(&table, row));
    (table, slots)
}

fn state(slot: &Slot) -> (f32, Vec<f32>) {
    let tensors = slot.tensors().unwrap();
    (flat(&tensors.quant_scale)[0], flat(&tensors.amax_history))
}

/// A rank that takes the maximum with `others`, or fails, and remembers what it was sent.
#[derive(Debug, Default)]
struct Rank {
    others: Vec<f32>,
    fails: Mutex<Option<&'static str>>,
    sent: Mutex<Vec<Vec<f32>>>,
}

impl ReductionGroup for Rank {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor> {
        self.sent.lock().unwrap().push(flat(amaxes));
        match *self.fails.lock().unwrap() {
            Some("short") => Ok(amaxes.narrow(0, 0, 1)?),
            Some(reason) => Err(Error::Group(reason.into())),
            None => {
                let others = Tensor::from_slice(&self.others, self.others.len(), &device())?;
                Ok(amaxes.maximum(&others)?)
            }
        }
    }
}

fn rule(rank: &Arc<Rank>) -> RowRule {
    let group: Arc<dyn ReductionGroup> = rank.clone();
    RowRule::new(DelayedRule::default(), Format::E4M3, 2).with_group(group)
}

fn record(step: &StepCells, row: usize, amax: f32) {
    let amax = Tensor::from_slice(&[amax], 1, &device()).unwrap();
    step.record(row, &amax, true).unwrap();
}

#[test]
fn ranks_send_every_row_whatever_they_have_used() -> Result<()> {
    let (table, slots) = three();
    let rank = Arc::new(Rank {
        others: vec![0., 7., 1.],
        ..Rank::default()
    });
    // This rank's tokens reached `a` only; `b` and `c` were used by others.
    let step = StepCells::new(&table)?;
    step.note_rule(0, Role::Input, rule(&rank));
    record(&step, 0, 3.5);
    table.commit(&step)?;
    assert_eq!(*rank.sent.lock().unwrap(), [vec![3.5, 0., 0.]]);
    assert_eq!(state(&slots[0]), (128., vec![3.5, 0.]));
    assert_eq!(state(&slots[1]), (64., vec![7., 0.]));
    assert_eq!(state(&slots[2]), (448., vec![1., 0.]));
    Ok(())
}

#[test]
fn a_failed_or_short_reduction_loses_nothing() -> Result<()> {
    for fault in ["a rank is gone", "short"] {
        let (table, slots) = three();
        let rank = Arc::new(Rank {
            others: vec![0.; 3],
            fails: Mutex::new(Some(fault)),
            ..Rank::default()
        });
        let step = StepCells::new(&table)?;
        step.note_rule(0, Role::Input, rule(&rank));
        record(&step, 0, 3.5);
        record(&step, 2, 7.);
        let error = table.commit(&step).unwrap_err().to_string();
        let part = if fault == "short" {
            "expected f32 [3]"
        } else {
            fault
        };
        assert!(error.contains(part), "{error}");
        assert_eq!(state(&slots[0]), (1., vec![0., 0.]), "{fault}");
        // The next step recovers, although nothing is recorded in `a` now.
        *rank.fails.lock().unwrap() = None;
        let step = StepCells::new(&table)?;
        step.note_rule(2, Role::Input, rule(&rank));
        record(&step, 2, 14.);
        table.commit(&step)?;
        assert_eq!(state(&slots[0]), (128., vec![3.5, 0.]), "{fault}");
        assert_eq!(state(&slots[2]), (32., vec![14., 0.]), "{fault}");
    }
    Ok(())
}

#[test]
fn updates_follow_each_rows_own_rule() -> Result<()> {
    let (table, slots) = three();
    let rules = [
        RowRule::new(
            DelayedRule::default()
                .with_margin(1)
                .with_amax_compute(AmaxCompute::MostRecent)
                .with_scale_rounding(ScaleRounding::PowerOfTwo),
            Format::E4M3,
            2,
        ),
        RowRule::new(DelayedRule::default(), Format::E5M2, 4),
    ];
    let run = |amaxes: [f32; 2]| -> Result<()> {
        let step = StepCells::new(&table)?;
        for (row, (rule, amax)) in rules.iter().zip(amaxes).enumerate() {
            step.note_rule(row, Role::Input, rule.clone());
            record(&step, row, amax);
        }
        table.commit(&step)
    };
    run([3.5, 14.])?;
    run([7., 3.5])?;
    assert_eq!(state(&slots[0]), (32., vec![7., 3.5]));
    assert_eq!(state(&slots[1]), (4096., vec![3.5, 14., 0., 0.]));
    run([1., 1.])?;
    assert_eq!(state(&slots[0]), (128., vec![1., 7.]), "the newest amax");
    Ok(())
}

#[test]
fn another_length_keeps_the_newest_amaxes() {
    let mut row = Row::new("l", Role::Input, 3);
    for amax in [1., 2., 3.] {
        row.record(amax);
        row.update();
    }
    for (window, expected) in [
        (2, vec![4., 3.]),
        (4, vec![4., 4., 3., 0.]),
        (1, vec![4.]),
        (3, vec![4., 4., 0.]),
    ] {
        row.rule.window = window;
        row.record(4.);
        row.update();
        assert_eq!(row.history(), expected, "{window}");
    }
}

/// The scale is for one format: casts to another format make theirs from the history, and the next update keeps it.
#[test]
fn a_change_of_the_format_makes_the_scale_anew() -> Result<()> {
    for recorded_again in [true, false] {
        let mut row = Row::new("l", Role::GradOutput, 4);
        row.rule.format = Format::E5M2;
        row.record(3.5);
        row.update();
        assert_eq!(row.scale(), 16384.);
        row.rule.format = Format::E4M3;
        if recorded_again {
            let q = row.train().quantize(&tensor(&[3.5]), Cols)?;
            assert_eq!(flat(&q.quant_scale), [128.], "in the step of the change");
            assert_eq!(flat(&q.tensor.dequantize(candle_core::DType::F32)?), [3.5]);
        }
        assert_eq!(
            flat(&row.eval().quantize(&tensor(&[3.5]), Cols)?.quant_scale),
            [128.]
        );
        row.update();
        assert_eq!(row.scale(), 128., "recorded again: {recorded_again}");
    }
    Ok(())
}

#[test]
fn what_a_backward_pass_records_after_its_step_counts_in_the_next() {
    let row = Row::new("l", Role::GradOutput, 3);
    let first = row.step();
    row.update();
    let amax = Tensor::from_slice(&[3.5f32], 1, &device()).unwrap();
    first.record(0, &amax, true).unwrap();
    row.update();
    assert_eq!(row.history(), [3.5, 0., 0.]);
}

#[test]
fn no_two_roundings_draw_the_same_bits() -> Result<()> {
    let (table, slots) = three();
    let mut keys: Vec<_> = (0..30)
        .map(|i| slots[i % 3].next_stochastic_key(7))
        .collect();
    // A failed step does not return its random bits, and a loaded table continues where it was.
    let rows = table.save()?.into_iter().map(|(_, row)| row).enumerate();
    table.restore(&rows.collect::<Vec<_>>())?;
    keys.extend((0..30).map(|i| slots[i % 3].next_stochastic_key(7)));
    keys.sort_by_key(|key| (key.tensor, key.step));
    keys.dedup();
    assert_eq!(keys.len(), 60);
    Ok(())
}

#[test]
fn rows_added_later_keep_what_the_others_hold() -> Result<()> {
    let (table, slots) = three();
    let step = StepCells::new(&table)?;
    let rank = Arc::new(Rank::default());
    let alone = rule(&rank).with_group(None);
    step.note_rule(0, Role::Input, alone);
    record(&step, 0, 3.5);
    assert_eq!(table.add_rows(&[("d", Role::Weight)], 5)?, 3);
    table.commit(&step)?;
    assert_eq!(state(&slots[0]), (128., vec![3.5, 0.]));
    assert_eq!(state(&Slot::new(&table, 3)), (1., vec![0.; 5]));
    let names: Vec<String> = table.names().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["a.input", "b.input", "c.input", "d.weight"]);
    Ok(())
}

#[test]
fn saved_values_that_no_step_leaves_are_refused() -> Result<()> {
    let (table, _) = three();
    let good = table.save()?.swap_remove(0).1;
    type Fault = (&'static str, fn(&mut SavedRow));
    let faults: [Fault; 10] = [
        ("dequant_scale", |row| row.dequant_scale = 2.),
        ("dequant_scale", |row| row.dequant_scale = f32::NAN),
        ("quant_scale", |row| row.quant_scale = 0.),
        ("quant_scale", |row| row.quant_scale = -1.),
        ("quant_scale", |row| row.quant_scale = f32::NAN),
        ("quant_scale", |row| row.quant_scale = f32::INFINITY),
        ("quant_scale", |row| row.quant_scale = 1e-40),
        ("amax_history", |row| row.amax_history = vec![1., f32::NAN]),
        ("amax_history", |row| row.amax_history = vec![1., -2.]),
        ("calibrated_amax", |row| {
            row.calibrated_amax = Some(f32::INFINITY)
        }),
    ];
    for (column, spoil) in faults {
        let mut bad = good.clone();
        spoil(&mut bad);
        let error = table.restore(&[(1, bad)]).unwrap_err().to_string();
        assert!(
            error.contains("b.input") && error.contains(column),
            "{error}"
        );
    }
    let unchanged = SavedRow { id: 1, ..good };
    assert_eq!(table.save()?[1].1, unchanged);
    Ok(())
}

#[test]
fn histories_have_a_longest_length() -> Result<()> {
    let limit = fp8_core::MAX_HISTORY_LEN;
    for len in [limit + 1, 100_000_000_000, usize::MAX] {
        let new = Slot::alone("slot", Role::Input, len, &device()).map(|_| ());
        let mut row = Row::new("slot", Role::Input, 3);
        row.rule.window = len;
        row.record(1.);
        for result in [new, row.end()] {
            let error = result.unwrap_err().to_string();
            let named = error.contains(&len.to_string()) && error.contains(&limit.to_string());
            assert!(named, "{error}");
        }
    }
    Ok(())
}

/// Everything that delayed scaling can produce can be read back.
#[test]
fn the_largest_scale_is_restored() -> Result<()> {
    let row = Row::new("l", Role::Input, 2);
    row.record(1e-45);
    row.update();
    assert_eq!(row.scale(), f32::MAX);
    let saved = row.slot.table().save()?.swap_remove(0).1;
    row.slot.table().restore(&[(0, saved)])?;
    assert_eq!(row.scale(), f32::MAX);
    Ok(())
}

/// A row that this rank does not use follows the rule and the group of the step, not those it had before.
#[test]
fn idle_rows_follow_the_rule_of_the_step() -> Result<()> {
    let (table, slots) = three();
    let first = Arc::new(Rank {
        others: vec![0.; 3],
        ..Rank::default()
    });
    let step = StepCells::new(&table)?;
    for row in 0..3 {
        step.note_rule(row, Role::Input, rule(&first));
        record(&step, row, 3.5);
    }
    table.commit(&step)?;
    // Another group and another margin; this rank's tokens reach `a` only.
    let second = Arc::new(Rank {
        others: vec![0., 7., 0.],
        ..Rank::default()
    });
    let mut changed = rule(&second);
    changed.rule.margin = 1;
    let step = StepCells::new(&table)?;
    step.note_rule(0, Role::Input, changed);
    record(&step, 0, 7.);
    table.commit(&step)?;
    assert_eq!(
        first.sent.lock().unwrap().len(),
        1,
        "one step with the first group"
    );
    assert_eq!(*second.sent.lock().unwrap(), [vec![7., 0., 0.]]);
    assert_eq!(state(&slots[0]), (32., vec![7., 3.5]));
    assert_eq!(state(&slots[1]), (32., vec![7., 3.5]));
    assert_eq!(state(&slots[2]).1, [3.5, 0.]);
    Ok(())
}

/// Rows added in the middle of a step have cells of their own; the step is still one update.
#[test]
fn the_parts_of_a_step_are_one_update() -> Result<()> {
    let (table, slots) = three();
    let rank = Arc::new(Rank {
        others: vec![0.; 4],
        ..Rank::default()
    });
    let early = StepCells::new(&table)?;
    early.note_rule(0, Role::Input, rule(&rank));
    record(&early, 0, 3.5);
    table.add_rows(&[("d", Role::Input)], 2)?;
    let late = StepCells::new(&table)?;
    late.note_rule(0, Role::Input, rule(&rank));
    late.note_rule(3, Role::Input, rule(&rank));
    record(&late, 0, 7.);
    record(&late, 3, 3.5);
    table.commit_all(&[&early, &late])?;
    assert_eq!(*rank.sent.lock().unwrap(), [vec![7., 0., 0., 3.5]]);
    assert_eq!(state(&slots[0]), (64., vec![7., 0.]));
    assert_eq!(state(&Slot::new(&table, 3)), (128., vec![3.5, 0.]));
    Ok(())
}

/// A calibration is saved and restored to the bit, in both directions of the scale.
#[test]
fn both_directions_of_a_calibrated_scale_come_back() -> Result<()> {
    let (table, slots) = three();
    for i in 0..200 {
        let amax = 0.37 + i as f32 * 0.0173;
        let step = StepCells::new(&table)?;
        record(&step, 1, amax);
        let wanted = |row| CalibrationRow::new(row, Format::E4M3);
        // A row that the table does not have is ignored.
        assert!(
            table
                .finish_calibration(&step, &[wanted(1), wanted(9)], None)?
                .is_empty()
        );
        let before = flat(&slots[1].tensors()?.dequant_scale);
        assert_eq!(before, [amax / 448.]);
        let rows = table.save()?.into_iter().map(|(_, row)| row).enumerate();
        table.restore(&rows.collect::<Vec<_>>())?;
        assert_eq!(flat(&slots[1].tensors()?.dequant_scale), before, "{amax}");
    }
    Ok(())
}
