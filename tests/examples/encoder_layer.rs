//! The comparison of `examples/encoder_layer`: f32, mixed precision and FP8 from the same parameters.

use crate::args::{Args, RunName, Steps};
use crate::compare::Apart;
use crate::layer::{Inputs, LayerConfig, LayerStep, Precision};
use crate::race::race;
use crate::report::{Setup, verdict};
use candle_core::{DType, Device};
use candle_nn::VarMap;
use clap::Parser;
use fp8::RecipeName;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Small, with every kind of product.
fn config() -> LayerConfig {
    LayerConfig {
        hidden: 64,
        sequence: 16,
        batch: 2,
        ffn: 256,
        heads: 4,
        ..LayerConfig::small()
    }
}

fn args(flags: &[&str]) -> Args {
    let words = [&["encoder_layer"], flags].concat();
    Args::try_parse_from(words).unwrap_or_else(|error| panic!("{flags:?}: {error}"))
}

#[test]
fn every_recipe_agrees_with_f32_within_the_error_of_its_dtypes() -> Outcome {
    let (vars, inputs) = (VarMap::new(), Inputs::random(config(), &Device::Cpu)?);
    let reference = LayerStep::with(config(), Precision::full(), &vars, &inputs)?;
    let expected = reference.pass()?;
    let apart = |precision: Precision| {
        let step = LayerStep::with(config(), precision, &vars, &inputs)?;
        // Delayed scaling makes its first scales from the first step.
        step.pass()?;
        Apart::between((&reference, &expected), (&step, &step.pass()?))
    };
    let exact = apart(Precision::full())?;
    assert!(exact.output < 1e-6 && exact.gradients < 1e-5, "{exact:?}");
    let mixed = apart(Precision::mixed(DType::BF16))?;
    assert!(mixed.output > exact.output, "bf16 was not used: {mixed:?}");
    assert!(mixed.is_within(&Apart::expected(Precision::mixed(DType::BF16))?));
    for recipe in RecipeName::ALL {
        for activations in [DType::F32, DType::BF16] {
            let precision = Precision::fp8(activations, recipe);
            let (apart, expected) = (apart(precision)?, Apart::expected(precision)?);
            assert!(
                apart.is_within(&expected),
                "{recipe} {activations:?}: {apart:?}, {expected:?}"
            );
            // Four significant bits are fewer than eight.
            assert!(
                apart.output > 2. * mixed.output,
                "{recipe} {activations:?} was not used: {apart:?} beside mixed {mixed:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn mixed_precision_computes_in_bf16_and_its_gradients_arrive_in_f32() -> Outcome {
    let (vars, inputs) = (VarMap::new(), Inputs::random(config(), &Device::Cpu)?);
    for precision in [
        Precision::mixed(DType::BF16),
        Precision::fp8(DType::BF16, RecipeName::Delayed),
    ] {
        let step = LayerStep::with(config(), precision, &vars, &inputs)?;
        let pass = step.pass()?;
        step.check(&pass.grads)?;
        assert_eq!(pass.output.dtype(), DType::BF16);
        assert_eq!(step.grad_input(&pass.grads)?.dtype(), DType::BF16);
        let parameters = vars.all_vars();
        assert_eq!(parameters.len(), 16); // weights and biases of six linear layers and two norms
        for var in parameters {
            let grad = pass.grads.get(&var).ok_or("no gradient")?;
            assert_eq!((var.dtype(), grad.dtype()), (DType::F32, DType::F32));
        }
    }
    Ok(())
}

#[test]
fn wrong_results_are_not_within_the_error_of_the_dtypes() -> Outcome {
    let vars = VarMap::new();
    let [inputs, others] = [0, 1].map(|_| Inputs::random(config(), &Device::Cpu));
    let reference = LayerStep::with(config(), Precision::full(), &vars, &inputs?)?;
    let precision = Precision::fp8(DType::F32, RecipeName::Direct);
    let wrong = LayerStep::with(config(), precision, &vars, &others?)?;
    let (expected, got) = (reference.pass()?, wrong.pass()?);
    let apart = Apart::between((&reference, &expected), (&wrong, &got))?;
    // The widest bound of all recipes.
    assert!(!apart.is_within(&Apart::expected(precision)?), "{apart:?}");
    let nan = Apart {
        output: f64::NAN,
        ..apart
    };
    assert!(!nan.is_within(&Apart {
        output: 1.,
        gradients: f64::INFINITY
    }));
    Ok(())
}

#[test]
fn narrower_dtypes_allow_larger_errors() -> Outcome {
    let expected = |precision| Apart::expected(precision).map(|apart| apart.output);
    let ascending = [
        expected(Precision::full())?,
        expected(Precision::mixed(DType::F16))?,
        expected(Precision::mixed(DType::BF16))?,
        expected(Precision::fp8(DType::BF16, RecipeName::Delayed))?,
        expected(Precision::fp8(DType::BF16, RecipeName::Direct))?,
    ];
    assert!(ascending.is_sorted_by(|a, b| a < b), "{ascending:?}");
    Ok(())
}

#[test]
fn a_race_times_every_run_and_reports_them_with_the_published_ratios() -> Outcome {
    let runs = args(&["--fp8", "tensorwise", "--fp8-activations", "bf16"]).runs()?;
    let steps = Steps {
        timed: 3,
        warmup: 1,
    };
    let outcomes = race(config(), &runs, steps, &Device::Cpu)?;
    assert_eq!(verdict(&outcomes)?, 2);
    let setup = Setup {
        config: config(),
        steps,
        is_cuda: false,
        tf32: false,
    };
    setup.print(&outcomes)?;
    let report = setup.json(&outcomes)?;
    let runs = report["runs"].as_array().ok_or("no runs")?;
    let names: Vec<_> = runs.iter().map(|run| run["name"].as_str()).collect();
    assert_eq!(names, [Some("f32"), Some("mixed"), Some("fp8")]);
    assert_eq!(runs[2]["fp8"], "tensorwise");
    assert_eq!(runs[2]["activations"], "bf16");
    for (run, outcome) in runs.iter().zip(&outcomes) {
        assert_eq!(outcome.times.len(), 3);
        let mean = outcome.times.iter().sum::<f64>() / 3.;
        assert_eq!(run["mean_ms"].as_f64(), Some(mean));
    }
    let mean = |at: usize| outcomes[at].mean_ms();
    let ratios = report["fp8_ratios"].as_array().ok_or("no ratios")?;
    for (ratio, (against, expected, published)) in ratios.iter().zip([
        ("f32", mean(0) / mean(2), 2.4),
        ("mixed", mean(1) / mean(2), 45. / 35.),
    ]) {
        assert_eq!(ratio["against"], against);
        assert_eq!(ratio["ratio"].as_f64(), Some(expected));
        assert_eq!(ratio["published_on_h100"].as_f64(), Some(published));
    }
    assert_eq!(ratios.len(), 2);
    Ok(())
}

#[test]
fn flags_choose_sizes_and_runs() -> Outcome {
    assert_eq!(args(&[]).layer()?, LayerConfig::small());
    assert_eq!(args(&["--published"]).layer()?, LayerConfig::published());
    assert_eq!(
        args(&["--device", "cuda"]).layer()?,
        LayerConfig::published()
    );
    assert_eq!(LayerConfig::published().hidden, 4096);
    let steps = args(&["--published", "--warmup", "2"]).steps()?;
    assert_eq!((steps.timed, steps.warmup), (20, 2));
    assert_eq!(args(&["--warmup", "0"]).steps()?.warmup, 1);
    let narrow = args(&["--published", "--hidden", "128", "--causal"]).layer()?;
    assert_eq!(
        (narrow.ffn, narrow.sequence, narrow.causal),
        (512, 2048, true)
    );

    let names = |flags: &[&str]| {
        let runs = args(flags).runs()?;
        Ok::<_, anyhow::Error>(runs.iter().map(|(name, _)| *name).collect::<Vec<_>>())
    };
    use RunName::{F32, Fp8, Mixed};
    assert_eq!(names(&[])?, [F32, Mixed, Fp8]);
    assert_eq!(names(&["--fp8", "off"])?, [F32, Mixed]);
    assert_eq!(names(&["--dtype", "f32"])?, [F32, Fp8]);
    assert_eq!(names(&["--runs", "fp8,f32"])?, [F32, Fp8]);
    let activations = |flags: &[&str]| {
        let runs = args(flags).runs()?;
        let fp8 = runs.iter().find(|(name, _)| *name == Fp8);
        anyhow::Context::context(
            fp8.map(|(_, precision)| precision.activations),
            "no FP8 run",
        )
    };
    assert_eq!(activations(&[])?, DType::F32);
    assert_eq!(activations(&["--fp8-activations", "f16"])?, DType::F16);
    assert_eq!(activations(&["--device", "cuda"])?, DType::BF16);

    for (flags, expected) in [
        (&["--runs", "mixed", "--dtype", "f32"][..], "--runs"),
        (&["--fp8", "off", "--runs", "fp8"], "--fp8"),
    ] {
        let error = args(flags).runs().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = args(&["--batch", "0"]).layer().unwrap_err().to_string();
    assert!(error.contains("--batch"), "{error}");
    let error = args(&["--iterations", "0"])
        .steps()
        .unwrap_err()
        .to_string();
    assert!(error.contains("--iterations"), "{error}");
    let error = Args::try_parse_from(["encoder_layer", "--fp8", "row-wise"]).err();
    let error = error.ok_or("an unknown recipe")?.to_string();
    assert!(error.contains("rowwise"), "{error}");
    Ok(())
}
