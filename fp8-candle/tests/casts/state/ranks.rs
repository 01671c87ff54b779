//! Ranks that reduce their amaxes together, and rows that no rank has used.

use super::*;

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
            "expected f32 [6]"
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
    table.commit_all(&[&early, &late], false)?;
    assert_eq!(*rank.sent.lock().unwrap(), [vec![7., 0., 0., 3.5]]);
    assert_eq!(state(&slots[0]), (64., vec![7., 0.]));
    assert_eq!(state(&Slot::new(&table, 3)), (128., vec![3.5, 0.]));
    Ok(())
}
