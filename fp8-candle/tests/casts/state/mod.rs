//! The scaling-state table: updates, ranks, steps that fail, changes of the rule.

mod ranks;
mod saved;

use crate::row::{Row, tensor};
use candle_core::Tensor;
use fp8_candle::device::backend;
use fp8_candle::state::{CalibrationRow, ReductionGroup, RowRule, SavedRow, StepCells};
use fp8_candle::{Error, Result, Role, Slot, StateTable};
use fp8_core::Contraction::Cols;
use fp8_core::{AmaxCompute, DelayedRule, Format, ScaleRounding};
use fp8_test_support::{device, flat, on_cuda};
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
        // The last three entries are the check, which the other rank passes.
        let rows = amaxes.elem_count() - 3;
        let check = amaxes.narrow(0, rows, 3)?;
        let amaxes = amaxes.narrow(0, 0, rows)?;
        self.sent.lock().unwrap().push(flat(&amaxes));
        match *self.fails.lock().unwrap() {
            Some("short") => Ok(amaxes.narrow(0, 0, 1)?),
            Some(reason) => Err(Error::Group(reason.into())),
            None => {
                let others = Tensor::from_slice(&self.others, self.others.len(), &device())?;
                Ok(Tensor::cat(&[amaxes.maximum(&others)?, check], 0)?)
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

/// A scale is for one format: casts to another format compute theirs from the history, and the next update keeps it.
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
        .map(|i| slots[i % 3].next_stochastic_key(7, 0))
        .collect();
    // A failed step still uses up its random bits, and a loaded table continues where it was.
    let rows = table.save()?.into_iter().map(|(_, row)| row).enumerate();
    table.restore(&rows.collect::<Vec<_>>())?;
    keys.extend((0..30).map(|i| slots[i % 3].next_stochastic_key(7, 0)));
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

/// Blocks of 32 values have millions of amaxes, which a GPU reads with many blocks of threads.
#[test]
fn many_amaxes_are_recorded_as_few() -> Result<()> {
    let device = device();
    for len in [1usize, 7, 2048, 2049, 5000, 70_001] {
        let amax = |at: usize| (at * 7919 % len) as f32 + 0.5;
        let largest = len as f32 - 0.5;
        for (at, value) in [(len, 0.), (len / 2, f32::INFINITY), (len - 1, f32::NAN)] {
            let amaxes: Vec<f32> = (0..len)
                .map(|i| if i == at { value } else { amax(i) })
                .collect();
            let expected = (0..len).filter(|&i| i != at).map(amax).fold(0., f32::max);
            assert!(at < len || expected == largest);
            let amaxes = Tensor::from_vec(amaxes, len, &device)?;
            let cells = backend(&device)?.amax_cells(&device, 3)?;
            cells.record(1, &amaxes, true)?;
            // Not from the first 16 bytes of their memory on.
            if len > 1 && at == len {
                cells.record(2, &amaxes.narrow(0, 1, len - 1)?, true)?;
            }
            let recorded = cells.read()?;
            let what = format!("{len} amaxes, {value} at {at}");
            assert_eq!(flat(&recorded.amax)[..2], [0., expected], "{what}");
            let counts = recorded.non_finite.to_vec1::<u32>()?;
            assert_eq!(counts, [0, u32::from(at < len), 0], "{what}");
            if len > 1 && at == len {
                let behind = (1..len).map(amax).fold(0., f32::max);
                assert_eq!(flat(&recorded.amax)[2], behind, "{what}");
            }
        }
    }
    Ok(())
}
