//! Steps after the last one under the recipe.

use crate::support::*;
use fp8::checkpoint::quantized_tensors;
use fp8::training::Learner;

/// Two steps under the recipe, then two without.
fn config() -> fp8::training::TrainerConfig {
    settings("delayed", 1).with_last_recipe_step(Some(2))
}

#[test]
fn the_last_steps_cast_nothing() -> Outcome {
    let dir = folder();
    let mut run = full(dir.path(), config());
    let mut other = full(dir.path(), settings("delayed", 1));
    let first = losses(&steps(&mut run, 2)?);
    assert_eq!(first, losses(&steps(&mut other, 2)?));
    let casts = quantized_tensors(run.model());
    assert!(casts > 0);
    let validated = run.validate()?;
    assert!(quantized_tensors(run.model()) > casts, "step 2 is under it");
    let casts = quantized_tensors(run.model());
    let last = losses(&steps(&mut run, 4)?);
    assert_ne!(last, losses(&steps(&mut other, 4)?));
    assert_ne!(run.validate()?, validated);
    assert_eq!(run.validate()?, run.validate_high_precision()?);
    assert_eq!(quantized_tensors(run.model()), casts);
    Ok(())
}

#[test]
fn a_resumed_run_repeats_them() -> Outcome {
    let dir = folder();
    let path = dir.path().join("run.safetensors");
    let mut whole = full(dir.path(), config()).with_checkpoint(&path);
    steps(&mut whole, 3)?;
    whole.save()?;
    let mut resumed = full(dir.path(), config()).with_checkpoint(&path);
    assert!(resumed.resume()?);
    assert_eq!(
        losses(&steps(&mut resumed, 5)?),
        losses(&steps(&mut whole, 5)?)
    );
    let mut other = full(dir.path(), settings("delayed", 1)).with_checkpoint(&path);
    let error = other.resume().expect_err("another run").to_string();
    assert!(
        error.contains("last_recipe_step is 2 in the run to resume, null here"),
        "{error}"
    );
    Ok(())
}
