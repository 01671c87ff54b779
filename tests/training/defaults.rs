//! What a program leaves out is what the documentation says.

use fp8::optim::{AdamWConfig, LrSchedule};
use fp8::training::{DatasetOptions, TrainerConfig, TurnOptions, Validation};
use serde_json::Value;

#[test]
fn rows_are_packed_and_a_twentieth_is_held_out() {
    let options = DatasetOptions::new(512);
    assert_eq!(options.context, 512);
    assert!(options.packing && options.end_of_text);
    assert_eq!(options.validation, Validation::Share(0.05));
    assert_eq!((options.seed, options.task), (0, None));
    assert!(options.labels.is_empty());
}

#[test]
fn gradients_are_clipped_to_1_in_high_precision() {
    let schedule = LrSchedule::constant(1e-3);
    let config = TrainerConfig::new(schedule.clone());
    assert_eq!(config.schedule, schedule);
    let clipped = AdamWConfig {
        max_grad_norm: Some(1.),
        ..AdamWConfig::default()
    };
    assert_eq!(config.optimizer, clipped);
    assert!(config.recipe.is_none() && config.prepare.is_none());
    assert_eq!((config.last_recipe_step, config.stats_every), (None, None));
    assert_eq!(config.micro_batches, 1);
    assert_eq!(config.settings, Value::Null);
}

#[test]
fn a_run_has_ten_validations_and_a_checkpoint_every_hundred_steps() {
    for (steps, between) in [(1, 1), (9, 1), (10, 1), (300, 30), (1005, 100)] {
        let options = TurnOptions::new(steps);
        assert_eq!(options.steps, steps);
        assert_eq!(options.validate_every, Some(between), "{steps}");
        assert_eq!(options.checkpoint_every, Some(100));
    }
    // A schedule falls to a tenth.
    let schedule = LrSchedule::cosine(1., 0, 100);
    assert!((schedule.lr(100) - 0.1).abs() < 1e-12);
}
