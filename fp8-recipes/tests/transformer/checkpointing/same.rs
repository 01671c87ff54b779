//! Loss, gradients, state, counts and casts under every recipe.

use super::harness::{Cut, Training, bits, tensor};
use candle_core::Var;
use fp8_recipes::config::{DelayedScaling, InitialScale, Recipe};
use fp8_recipes::{Autocast, RecipeName, end_step, fp8_autocast};

/// When the backward pass runs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Backward {
    GuardOpen,
    GuardClosed,
    /// Two batches in one guard, both backward passes after it: by then the table has other scales.
    BothAfter,
    /// One guard around all.
    StepEnded,
}

const FLOWS: [Backward; 4] = [
    Backward::GuardOpen,
    Backward::GuardClosed,
    Backward::BothAfter,
    Backward::StepEnded,
];

fn recipes() -> Vec<Recipe> {
    let mut recipes: Vec<Recipe> = RecipeName::ALL.into_iter().map(Recipe::from).collect();
    let delayed = DelayedScaling::default().with_amax_history_len(3);
    recipes.push(delayed.with_initial(InitialScale::FirstBatch).into());
    recipes
}

/// Three steps.
fn train(cut: Cut, recipe: &Recipe, flow: Backward, collects: bool) -> Vec<String> {
    let training = Training::new(cut);
    let observer = training.observer();
    let autocast = || Autocast::new(recipe.clone()).with_cast_observer(&observer);
    let mut seen = vec![];
    let around = (flow == Backward::StepEnded).then(|| fp8_autocast(autocast()).unwrap());
    for step in 0..3 {
        let x = Var::from_tensor(&tensor(100 + step, &[2, 8, 32])).unwrap();
        let loss = |seed| {
            let loss = training.loss(x.as_tensor(), seed).unwrap();
            // Larger from step to step, so that scales change.
            (loss * f64::from(1 << step)).unwrap()
        };
        let backward = |loss: &candle_core::Tensor| match collects {
            true => fp8_candle::wide::backward(loss).unwrap(),
            false => loss.backward().unwrap(),
        };
        let guard = around.is_none().then(|| fp8_autocast(autocast()).unwrap());
        let mut losses = vec![loss(step)];
        if flow == Backward::BothAfter {
            losses.push(loss(step + 50));
        }
        let mut grads = vec![];
        if flow == Backward::GuardOpen {
            grads.extend(losses.iter().map(backward));
        }
        if let Some(guard) = guard {
            let summary = guard.close().unwrap();
            let non_finite = summary.non_finite().unwrap();
            seen.push(format!(
                "{} {} {non_finite:?}",
                summary.casts(),
                summary.layers()
            ));
        }
        if flow == Backward::StepEnded {
            seen.push(format!("{}", end_step().unwrap().casts()));
        }
        if grads.is_empty() {
            grads.extend(losses.iter().map(backward));
        }
        seen.extend(losses.iter().map(|loss| format!("{:?}", bits(loss))));
        for grads in &grads {
            seen.push(format!("x {:?}", bits(grads.get(&x).unwrap())));
        }
        // All backward passes come before the first step.
        for grads in &grads {
            seen.extend(
                training
                    .step(grads)
                    .into_iter()
                    .map(|grad| format!("{grad:?}")),
            );
        }
        seen.push(training.trace());
    }
    seen
}

#[test]
fn training_is_the_same_under_every_recipe() {
    for recipe in recipes() {
        for flow in FLOWS {
            let plain = train(Cut::Nowhere, &recipe, flow, false);
            for cut in [Cut::Layers, Cut::Nested] {
                let case = format!("{recipe} {flow:?} {cut:?}");
                let checkpointed = train(cut, &recipe, flow, false);
                assert_eq!(checkpointed.len(), plain.len(), "{case}");
                for (checkpointed, plain) in checkpointed.iter().zip(&plain) {
                    for (checkpointed, plain) in checkpointed.lines().zip(plain.lines()) {
                        assert_eq!(checkpointed, plain, "{case}");
                    }
                    assert_eq!(checkpointed, plain, "{case}");
                }
            }
        }
    }
}

#[test]
fn gradients_that_are_collected_past_the_store_are_the_same() {
    for recipe in [RecipeName::Delayed, RecipeName::Hybrid] {
        let recipe = Recipe::from(recipe);
        for cut in [Cut::Layers, Cut::Nested] {
            for flow in [Backward::GuardOpen, Backward::GuardClosed] {
                let plain = train(Cut::Nowhere, &recipe, flow, true);
                assert_eq!(train(cut, &recipe, flow, true), plain, "{recipe} {cut:?}");
            }
        }
    }
}

#[test]
fn the_comparison_sees_steps_and_recipes() {
    let seen = |recipe: RecipeName| train(Cut::Nowhere, &recipe.into(), FLOWS[0], false);
    let (delayed, direct) = (seen(RecipeName::Delayed), seen(RecipeName::Direct));
    assert_ne!(delayed, direct);
    assert_ne!(delayed.first(), delayed.last());
}
