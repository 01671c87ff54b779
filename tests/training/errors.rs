//! What goes wrong in a run is said with its name.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use fp8::PrepareOptions;
use fp8::optim::AdamWConfig;
use fp8::training::{Error, Learner, RunFolder, TrainableModel, Trainer, TrainerConfig};

fn set_nan(run: &Run, name: &str) {
    let vars = run.vars().data().lock().expect("a lock");
    let var = &vars[name];
    let bad = (Tensor::ones_like(var).expect("ones") * f64::NAN).expect("NaN");
    var.set(&bad).expect("set");
}

#[test]
fn a_loss_that_is_not_finite_names_its_origin_and_the_last_checkpoint() -> Outcome {
    let dir = folder();
    let path = dir.path().join("run.safetensors");
    let name = "model.layers.1.mlp.up_proj.weight";
    for (recipe, origin) in [
        ("f32", format!("the parameter {name}")),
        ("delayed", "model.layers.1.mlp.up_proj.weight".to_string()),
    ] {
        let mut run = full(dir.path(), settings(recipe, 1)).with_checkpoint(&path);
        steps(&mut run, 2)?;
        run.save()?;
        set_nan(&run, name);
        let error = steps(&mut run, 4).expect_err("an error");
        let text = error.to_string();
        assert!(
            text.contains("run: the loss in step 3 is not finite"),
            "{text}"
        );
        assert!(text.contains(&format!("first from {origin}")), "{text}");
        assert!(text.contains("run.safetensors holds step 2"), "{text}");
        assert!(matches!(error, Error::NotFinite { step: 3, .. }));
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// Finite parameters whose products are not: a run in high precision names the operand, as one under a recipe does.
#[test]
fn an_activation_that_is_not_finite_is_named() -> Outcome {
    let dir = folder();
    for recipe in ["f32", "rowwise"] {
        for parts in [1, 2] {
            let mut run = full(dir.path(), settings(recipe, parts));
            steps(&mut run, 2)?;
            let vars = run.vars().data().lock().expect("a lock");
            let var = &vars["model.layers.1.mlp.up_proj.weight"];
            var.set(&(Tensor::ones_like(var)? * 3e38)?)?;
            drop(vars);
            let text = steps(&mut run, 4).expect_err("an error").to_string();
            let origin = "Inf or NaN came first from model.layers.1.mlp.down_proj.input;";
            assert!(text.contains(origin), "{recipe}: {text}");
        }
    }
    Ok(())
}

#[test]
fn a_checkpoint_of_other_settings_is_refused() -> Outcome {
    let dir = folder();
    let path = dir.path().join("run.safetensors");
    let mut run = full(dir.path(), settings("delayed", 1)).with_checkpoint(&path);
    steps(&mut run, 1)?;
    run.save()?;
    let refused = |config| {
        let mut run = full(dir.path(), config).with_checkpoint(&path);
        let error = run.resume().expect_err("an error").to_string();
        assert_eq!(run.step(), 0, "{error}");
        error
    };
    let error = refused(settings("delayed", 2));
    assert!(
        error.contains("micro_batches is 1 in the run to resume, 2 here"),
        "{error}"
    );
    let same = settings("delayed", 1);
    let optimizer = AdamWConfig {
        beta2: 0.5,
        ..same.optimizer.clone()
    };
    let error = refused(same.with_optimizer(optimizer));
    assert!(
        error.contains("optimizer.beta2 is 0.999 in the run to resume, 0.5 here"),
        "{error}"
    );
    let error = refused(settings("delayed", 1).with_settings("other".into()));
    assert!(error.contains("settings is null"), "{error}");
    refused(settings("rowwise", 1));
    std::fs::write(
        text(dir.path()),
        "another text, and another one. ".repeat(60),
    )?;
    let error = refused(settings("delayed", 1));
    assert!(error.contains("data is "), "{error}");
    Ok(())
}

#[test]
fn measurements_and_a_last_step_need_a_recipe_and_a_number() -> Outcome {
    let dir = folder();
    let every = |recipe, steps| settings(recipe, 1).with_stats_every(Some(steps));
    let last = |recipe, step| settings(recipe, 1).with_last_recipe_step(Some(step));
    for (config, expected) in [
        (
            every("f32", 1),
            "stats_every is 1, expected None without a recipe",
        ),
        (every("delayed", 0), "stats_every is 0, expected at least 1"),
        (
            last("f32", 2),
            "last_recipe_step is 2, expected None without a recipe",
        ),
        (
            last("delayed", 0),
            "last_recipe_step is 0, expected at least 1",
        ),
    ] {
        let base = TrainableModel::open(dir.path(), DType::F32, &Device::Cpu)?;
        let trainer = Trainer::new("run", base.model, base.vars, objective(dir.path()), config);
        assert_eq!(trainer.expect_err("refused").to_string(), expected);
    }
    Ok(())
}

#[test]
fn a_parameter_without_a_gradient_is_named() -> Outcome {
    let dir = folder();
    let base = TrainableModel::open(dir.path(), DType::F32, &Device::Cpu)?;
    let zeros = fp8::nn::Init::Const(0.);
    base.vars
        .get((2, 2), "unused.weight", zeros, DType::F32, &Device::Cpu)?;
    let objective = objective(dir.path());
    let mut run = Trainer::new("run", base.model, base.vars, objective, settings("f32", 1))?;
    let error = run.train_step().expect_err("an error").to_string();
    assert_eq!(error, "run: no gradient reached unused.weight");
    assert_eq!(run.step(), 0);
    Ok(())
}

#[test]
fn a_folder_holds_one_run() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run");
    let error = RunFolder::open(&path).expect_err("an error").to_string();
    assert!(error.contains("holds no run to resume"), "{error}");
    let folder = RunFolder::create(&path, &"settings", false)?;
    assert_eq!(folder.settings::<String>()?, "settings");
    let error = folder.settings::<u8>().expect_err("an error").to_string();
    assert!(error.contains("run.json"), "{error}");
    std::fs::write(folder.checkpoint("run"), "a checkpoint")?;
    std::fs::write(path.join("notes.txt"), "of somebody else")?;
    let error = RunFolder::create(&path, &0, false)
        .expect_err("an error")
        .to_string();
    assert!(error.contains("holds an earlier run (run.json)"), "{error}");
    let folder = RunFolder::create(&path, &1, true)?;
    assert!(!folder.checkpoint("run").exists());
    assert!(path.join("notes.txt").exists(), "not a file of a run");
    Ok(())
}

/// Not even on request: without a run there is nothing to replace.
#[test]
fn what_another_program_has_in_a_folder_stays() -> Outcome {
    for found in ["checkpoint", "model", "adapter"] {
        let dir = tempfile::tempdir()?;
        let mine = dir.path().join(found).join("weights.bin");
        std::fs::create_dir(dir.path().join(found))?;
        std::fs::write(&mine, "mine")?;
        for replace in [false, true] {
            let error = RunFolder::create(dir.path(), &0, replace).expect_err("an error");
            let Error::NotOfARun { found: named, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(named, found);
            assert!(error.to_string().contains("no run.json"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&mine)?, "mine");
        assert!(!dir.path().join("run.json").exists());
    }
    Ok(())
}

/// Options of a preparation that a run does not make would have no effect.
#[test]
fn what_only_a_recipe_uses_is_refused_without_one() -> Outcome {
    let dir = folder();
    let prepare = PrepareOptions::default().with_off("lm_head")?;
    let refused = |config: TrainerConfig| {
        let base = TrainableModel::open(dir.path(), DType::F32, &Device::Cpu)?;
        let made = Trainer::new("run", base.model, base.vars, objective(dir.path()), config);
        Ok::<_, Error>(made.err().map(|error| error.to_string()))
    };
    for (config, key) in [
        (
            settings("f32", 1).with_prepare(Some(prepare.clone())),
            "prepare",
        ),
        (settings("f32", 1).with_stats_every(Some(2)), "stats_every"),
    ] {
        let error = refused(config)?.ok_or("no error")?;
        assert!(
            error.starts_with(key) && error.ends_with("expected None without a recipe"),
            "{error}"
        );
    }
    assert_eq!(
        refused(settings("rowwise", 1).with_prepare(Some(prepare)))?,
        None
    );
    Ok(())
}
