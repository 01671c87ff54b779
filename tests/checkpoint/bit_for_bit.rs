//! A resumed run continues bit for bit.

use crate::run::*;
use fp8::config::{InitialScale, Recipe};
use fp8::load::Checkpoint;
use fp8_test_support::{delayed, device, flat, slot, slots};

/// Compares three runs after the checkpoint: an uninterrupted one, one that saves and goes on, and one that resumes.
#[track_caller]
fn assert_resumes(name: &str, recipe: Option<Recipe>, style: Style) {
    let case = format!("{name}, {style:?}");
    let dir = tempfile::tempdir().unwrap();
    let mut uninterrupted = Run::new(1, recipe.clone(), style);
    let mut saving = Run::new(1, recipe.clone(), style);
    let expected: Vec<_> = (0..STEPS).map(|_| uninterrupted.train()).collect();
    for step in 0..SAVED_AT {
        assert_eq!(
            saving.train(),
            expected[step as usize],
            "{case}: step {step} before saving"
        );
    }
    saving.save(&file(&dir));
    let mut resumed = Run::new(99, recipe, style);
    // A run with other values that has trained for a while before it resumes.
    resumed.train();
    let meta = resumed.resume(&file(&dir)).unwrap();
    assert_eq!(meta, saving.meta(), "{case}: meta");
    assert_everything(&format!("{case}: state after resuming"), &resumed, &saving);
    for step in SAVED_AT..STEPS {
        let expected = &expected[step as usize];
        assert_eq!(
            saving.train(),
            *expected,
            "{case}: step {step} after saving"
        );
        assert_eq!(
            resumed.train(),
            *expected,
            "{case}: step {step} after resuming"
        );
    }
    for run in [&mut uninterrupted, &mut saving, &mut resumed] {
        fp8::end_step().unwrap();
        run.save(&file(&dir));
    }
    assert_everything(
        &format!("{case}: saving left a trace"),
        &saving,
        &uninterrupted,
    );
    assert_everything(&format!("{case}: last state"), &resumed, &uninterrupted);
    let losses: Vec<f32> = expected
        .iter()
        .map(|bits| f32::from_bits(bits[0]))
        .collect();
    assert!(
        losses.iter().all(|loss| loss.is_finite()),
        "{case}: {losses:?}"
    );
}

#[test]
fn every_recipe_resumes_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Plain);
    }
}

#[test]
fn runs_with_validation_resume_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Validation);
    }
}

#[test]
fn runs_with_gradient_accumulation_resume_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe.clone(), Style::OneGuard);
        assert_resumes(&name, recipe, Style::GuardEach);
    }
}

#[test]
fn runs_with_a_frozen_weight_resume_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Frozen);
    }
}

#[test]
fn runs_whose_last_step_changed_no_weight_resume_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe.clone(), Style::Skipped);
        assert_resumes(&name, recipe, Style::Standstill);
    }
}

#[test]
fn a_checkpoint_from_before_the_first_step_resumes() {
    for initial in [InitialScale::One, InitialScale::FirstBatch] {
        let recipe: Recipe = delayed(4).with_initial(initial).into();
        let dir = tempfile::tempdir().unwrap();
        let mut first = Run::new(1, Some(recipe.clone()), Style::Plain);
        first.save(&file(&dir));
        let mut resumed = Run::new(2, Some(recipe), Style::Plain);
        resumed.resume(&file(&dir)).unwrap();
        for step in 0..4 {
            assert_eq!(resumed.train(), first.train(), "{initial:?}, step {step}");
        }
    }
}

#[test]
fn saving_does_not_wait_for_the_next_guard() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    run.train();
    let before = slot(&run.mlp.up, "grad_output").quant_scale;
    run.save(&file(&dir));
    let after = slot(&run.mlp.up, "grad_output").quant_scale;
    assert_eq!(before, 1., "the gradients' update was pending");
    assert_ne!(after, 1., "saving ends the step");
    let stored = Checkpoint::open(&[file(&dir)]).unwrap();
    let stored = stored.tensor("fp8/quant_scale", &device()).unwrap();
    // Rows are sorted by name: down.grad_output, .input, .weight, then up.grad_output.
    assert_eq!(flat(&stored)[3], after);
}

#[test]
fn a_checkpoint_with_histories_of_another_length_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let recipe: Recipe = delayed(4).into();
    let mut first = Run::new(1, Some(recipe.clone()), Style::Plain);
    // Until its first update fresh state has histories of 1024; those of the checkpoint have 4.
    first.train();
    first.save(&file(&dir));
    let mut resumed = Run::new(2, Some(recipe), Style::Plain);
    resumed.resume(&file(&dir)).unwrap();
    assert_eq!(slots(&resumed.mlp.up), slots(&first.mlp.up));
    assert_eq!(resumed.train(), first.train());
}
