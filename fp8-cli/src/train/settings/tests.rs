use super::super::Args;
use super::*;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn settings(more: &str) -> Result<Settings> {
    let line = format!("fp8 model --out run --data a.txt {more}");
    Ok(Cli::try_parse_from(line.split_whitespace())?.args.settings)
}

#[test]
fn weight_decay_is_that_of_matrices() -> Result<()> {
    let optimizer = settings("--weight-decay 0.5")?.trainer()?.optimizer;
    assert_eq!(optimizer.weight_decay, 0.5);
    assert_eq!(optimizer.decay_scope, DecayScope::Matrices);
    Ok(())
}

/// What the guide's page on fine-tuning says of a run whose command names nothing else.
#[test]
fn defaults_are_those_of_the_guide() -> Result<()> {
    for (more, lr, name) in [("", 2e-5, "delayed"), ("--lora 8", 2e-4, "lora")] {
        let settings = settings(more)?;
        assert_eq!(settings.name(), name);
        assert_eq!((settings.batch, settings.context()), (8, 512));
        assert_eq!((settings.steps, settings.checkpoint_every), (300, 100));
        assert_eq!(settings.temperature, 0.05);
        let trainer = settings.trainer()?;
        // A rise for a twentieth of the steps, then a cosine to a tenth.
        let rates = [0, 14, 15, 300].map(|step| trainer.schedule.lr(step) / lr);
        for (rate, expected) in rates.into_iter().zip([1. / 15., 1., 1., 0.1]) {
            assert!((rate - expected).abs() < 1e-12, "{rates:?}");
        }
        assert_eq!(trainer.optimizer.weight_decay, 0.);
        assert_eq!(trainer.optimizer.max_grad_norm, Some(1.));
        assert_eq!(trainer.micro_batches, 1);
        assert!(matches!(
            settings.dataset().validation,
            Validation::Share(0.05)
        ));
        // Validations each tenth of the steps are the driver's default.
        assert_eq!(settings.validate_every, None);
        let turns = fp8::training::TurnOptions::new(settings.steps);
        assert_eq!(turns.validate_every, Some(30));
    }
    Ok(())
}

/// A recipe that casts operators casts those of the model.
#[test]
fn operators_are_prepared_for_recipes_that_cast_them() -> Result<()> {
    for (name, operators) in [("direct", true), ("hybrid", true), ("delayed", false)] {
        let prepare = settings(&format!("--recipe {name}"))?.trainer()?.prepare;
        let expected = PrepareOptions::default().with_operators(operators);
        assert_eq!(format!("{prepare:?}"), format!("{:?}", Some(expected)));
    }
    Ok(())
}

/// Weights rounded at random belong to what a resumed run must agree with; those of earlier versions were rounded to nearest.
#[test]
fn weight_rounding_is_that_of_all_recipes() -> Result<()> {
    let nearest = settings("--layer *.q_proj=rowwise")?;
    let random = settings("--layer *.q_proj=rowwise --weight-rounding stochastic --seed 3")?;
    let [nearest_trainer, trainer] = [nearest.trainer()?, random.trainer()?];
    assert_eq!(nearest_trainer.recipe, Some(RecipeName::Delayed.into()));
    let expected = |name| {
        let config = Fp8LinearConfig::from_recipe_name(name);
        let config = config.with_weight_rounding(CastRounding::Stochastic);
        config.with_seed(3)
    };
    assert_eq!(trainer.recipe, Some(expected(RecipeName::Delayed).into()));
    let prepare =
        PrepareOptions::default().with_recipe("*.q_proj", expected(RecipeName::Rowwise))?;
    let [own, prepare] = [&trainer.prepare, &Some(prepare)].map(|options| format!("{options:?}"));
    assert_eq!(own, prepare);
    assert!(nearest_trainer.settings.get("weight_rounding").is_none());
    assert_eq!(trainer.settings["weight_rounding"], "stochastic");
    let mut stored = serde_json::to_value(&nearest)?;
    stored
        .as_object_mut()
        .expect("an object")
        .remove("weight_rounding");
    let stored: Settings = serde_json::from_value(stored)?;
    assert_eq!(stored.weight_rounding, WeightRounding::Nearest);
    Ok(())
}
