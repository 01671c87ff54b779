//! Saved values.

use super::*;

#[test]
fn saved_values_that_no_step_leaves_are_refused() -> Result<()> {
    let (table, _) = three();
    let before = table.save()?;
    let good = &before[0].1;
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
    assert_eq!(table.save()?, before);
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

/// All values that delayed scaling can produce can be read back.
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

/// The smallest scale too: a margin and an amax near the largest f32 would give a subnormal one.
#[test]
fn the_smallest_scale_is_restored() -> Result<()> {
    for margin in [7, 64] {
        for rounding in [ScaleRounding::Exact, ScaleRounding::PowerOfTwo] {
            let mut row = Row::new("l", Role::Input, 1);
            row.rule.rule = DelayedRule::default()
                .with_margin(margin)
                .with_scale_rounding(rounding);
            let table = row.slot.table();
            let comes_back = || -> Result<()> {
                assert_eq!(row.scale(), f32::MIN_POSITIVE, "{margin}");
                assert_eq!(row.dequant_scale(), 2f32.powi(126), "{margin}");
                let saved = table.save()?.swap_remove(0).1;
                table.restore(&[(0, saved.clone())])?;
                assert_eq!(table.save()?.swap_remove(0).1, saved);
                Ok(())
            };
            row.record(f32::MAX);
            row.update();
            comes_back()?;
            // A calibration by the same rule.
            let step = StepCells::new(table)?;
            record(&step, 0, f32::MAX);
            let wanted = CalibrationRow::new(0, Format::E4M3).with_rule(row.rule.clone());
            assert!(table.finish_calibration(&step, &[wanted], None)?.is_empty());
            comes_back()?;
        }
    }
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
