//! What encoders cannot learn, and adapters that do not fit them.

use crate::encoder::{adapters, bert, classify, dataset, folder, run, steps, texts};
use crate::support::Outcome;
use candle_core::{DType, Device};
use fp8::models::{Model, ModelOptions, open};
use fp8::training::{Contrast, Error, Learner, Objective, Part, TrainableModel};
use fp8_test_support::encoder;

#[test]
fn what_does_not_fit_is_said() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let error = Contrast::new(dataset(dir, encoder::labelled(dir)), 2).expect_err("an error");
    assert!(error.to_string().contains("Task::Embedding"), "{error}");
    let data = dataset(dir, encoder::queries(dir, false));
    let error = Contrast::new(data, 1).expect_err("an error").to_string();
    assert!(
        error.contains("at least 2, or texts with a `negative`"),
        "{error}"
    );
    let data = dataset(dir, encoder::queries(dir, true));
    let error = Contrast::new(data, 1)?
        .with_temperature(0.)
        .expect_err("an error");
    assert!(
        matches!(
            error,
            Error::Setting {
                key: "temperature",
                ..
            }
        ),
        "{error}"
    );

    // A model without a classifier, or of other classes.
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu)?;
    let mut run = run(base, Box::new(classify(dir)), "f32", 1);
    let error = run.train_step().expect_err("an error").to_string();
    let expected = "the data has the classes cold, warm, the model no classifier";
    assert_eq!(error, expected);
    let error = bert(run.model()).classify(&texts().0, &texts().1);
    assert!(
        error
            .expect_err("an error")
            .to_string()
            .contains("no classifier")
    );

    // Parts of a single query have nothing to tell it from, and neither has the last batch of a validation.
    let goal = Contrast::new(dataset(dir, encoder::queries(dir, false)), 4)?;
    assert!(goal.micro_batch(0, Part::new(0, 2)).is_ok());
    let error = goal.micro_batch(0, Part::new(0, 4)).expect_err("an error");
    assert!(error.to_string().contains("micro_batches is 4"), "{error}");
    let held_out = goal.data().validation_batches(1).count();
    let rows = held_out - 1;
    let goal = Contrast::new(dataset(dir, encoder::queries(dir, false)), rows)?;
    assert_eq!(
        (
            goal.data().validation_batches(rows).count(),
            goal.validation_batches()
        ),
        (2, 1)
    );
    Ok(())
}

#[test]
fn an_adapter_of_other_classes_is_refused() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let mut run = adapters(dir, dir);
    steps(&mut run, 1);
    let adapter = dir.join("adapter");
    run.model().save_adapter("new", &adapter)?;
    for labels in [vec!["a", "b"], vec!["cold", "warm", "hot"]] {
        let mut model = open(dir, &ModelOptions::new())?;
        let Model::Bert(bert) = &mut model else {
            panic!("an encoder");
        };
        bert.set_labels(labels.iter().map(|label| label.to_string()).collect())?;
        let error = model
            .load_adapter("other", &adapter)
            .expect_err("an error")
            .to_string();
        let expected = format!(
            "classes {}, and the adapter has cold, warm",
            labels.join(", ")
        );
        assert!(error.contains(&expected), "{error}");
        let Model::Bert(bert) = &model else {
            panic!("an encoder");
        };
        assert_eq!(bert.labels(), labels);
    }
    Ok(())
}
