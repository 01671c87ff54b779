//! Calibrations that are missing, failed or out of date.

use crate::net::*;
use candle_core::{DType, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{DelayedFormat, Recipe};
use fp8::fp8_core::AmaxCompute;
use fp8::load::{Checkpoint, var_builder};
use fp8::nn::{Linear, NamedTensor};
use fp8::{Autocast, Error, fp8_autocast, save_calibrated};
use fp8_test_support::{assert_same, assert_text, delayed, device, flat, of, prepare, tensor};

#[test]
fn saving_without_calibration_names_the_layer() {
    let dir = dir();
    let save = |net: &Net| save_calibrated(net, dir.path()).unwrap_err();

    let (_vars, fresh) = prepared();
    let error = save(&fresh);
    assert!(
        matches!(&error, Error::Export(fp8::ExportError::NotCalibrated { path }) if path == "blocks.0.fc1"),
        "{error:?}"
    );
    assert_text("no guard", error, &["`blocks.0.fc1`", "calibrating guard"]);

    // A guard under which no batch ran.
    fp8_autocast(Autocast::new(delayed(4)).calibrating(true))
        .unwrap()
        .close()
        .unwrap();
    assert_text(
        "no batch",
        save(&fresh),
        &["`blocks.0.fc1`", "at least one batch"],
    );

    // An empty batch does not count.
    {
        let _guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        fresh.blocks[0]
            .fc1
            .forward(&tensor(1, &[0, WIDTH]))
            .unwrap();
    }
    assert_text("empty batch", save(&fresh), &["`blocks.0.fc1`"]);

    // The batch reached only some of the layers.
    {
        let _guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        for layer in [&fresh.blocks[0].fc1, &fresh.blocks[1].fc1] {
            layer.forward(&tensor(1, &[2, WIDTH])).unwrap();
        }
    }
    assert_text("a branch not run", save(&fresh), &["`blocks.0.fc2`"]);

    // Training does not calibrate.
    let (_vars, trained) = prepared();
    drop(eval(&trained, delayed(4), &ids(0)));
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        trained.forward(&ids(0)).unwrap();
    }
    assert_text(
        "trained",
        save(&trained),
        &["`blocks.0.fc1`", "not calibrated"],
    );

    let vars = VarMap::new();
    let plain = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    calibrate(&plain, delayed(4));
    assert!(matches!(
        save(&plain),
        Error::Export(fp8::ExportError::NothingToExport)
    ));
    assert_text("nothing prepared", save(&plain), &["nothing to export"]);
    assert_eq!(
        names_in(dir.path()),
        Vec::<String>::new(),
        "nothing was written"
    );
}

#[test]
fn nan_activations_while_calibrating_are_an_error_that_names_the_layer() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (_vars, net) = prepared();
        let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        net.forward(&ids(0)).unwrap();
        let mut x = vec![0.5; WIDTH];
        x[3] = bad;
        net.blocks[1].fc1.forward(&of(&x, &[1, WIDTH])).unwrap();
        net.forward(&ids(1)).unwrap();
        assert_text("close", guard.close().unwrap_err(), &["blocks.1.fc1.input"]);
        let dir = dir();
        let error = save_calibrated(&net, dir.path()).unwrap_err();
        assert_text(
            &bad.to_string(),
            error,
            &["`blocks.1.fc1`", "not calibrated"],
        );
        // A good calibration afterwards gives what it would have given without the bad one.
        calibrate(&net, delayed(4));
        let (_vars, control) = calibrated(delayed(4));
        save_calibrated(&net, dir.path()).unwrap();
        let expected = eval(&control, delayed(4), &ids(2));
        assert_same(
            "after a good one",
            &eval(&net, delayed(4), &ids(2)),
            &expected,
        );
    }
}

#[test]
fn after_training_a_new_calibration_is_needed() {
    let (vars, net) = calibrated(delayed(4));
    let dir = dir();
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        net.forward(&ids(0)).unwrap();
    }
    let error = save_calibrated(&net, dir.path()).unwrap_err();
    assert_text(
        "trained since",
        error,
        &["`blocks.0.fc1`", "not calibrated"],
    );
    // The earlier calibration saw larger weights and inputs: a rule that looks at the newest amax alone forgets them.
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    calibrate(&net, delayed(4).with_amax_compute(AmaxCompute::MostRecent));
    save_calibrated(&net, dir.path()).unwrap();
    let file = Checkpoint::open(&[dir.path().join("model.safetensors")]).unwrap();
    let amax = flat(&net.blocks[0].fc1.weight().unwrap())
        .into_iter()
        .fold(0f32, |max, x| max.max(x.abs()));
    let scale = flat(&file.tensor("blocks.0.fc1.weight_scale", &device()).unwrap())[0];
    assert_eq!(
        scale,
        1. / (448. / amax),
        "the scale of the weight as it is now"
    );
}

#[test]
fn tensors_without_a_name_or_with_the_same_name_are_refused() {
    let dir = dir();
    let mut layer = Linear::new(tensor(1, &[3, 4]), None).with_path("fc");
    prepare(&mut layer);
    {
        let _guard = fp8_autocast(Autocast::default().calibrating(true)).unwrap();
        layer.forward(&tensor(2, &[2, 4])).unwrap();
    }
    let unnamed = Linear::new(tensor(3, &[5, 4]), None);
    let error = save_calibrated(&(layer.clone(), unnamed), dir.path()).unwrap_err();
    assert_text("no path", error, &["[5, 4]", "no path"]);
    let parameter = |seed| NamedTensor::new("scale", tensor(seed, &[4]));
    let model = (layer.clone(), vec![parameter(4), parameter(5)]);
    let error = save_calibrated(&model, dir.path()).unwrap_err();
    assert_text("one name", error, &["`scale`", "two different tensors"]);
    let other = Linear::new(tensor(6, &[3, 4]), None).with_path("fc");
    let error = save_calibrated(&(layer, other), dir.path()).unwrap_err();
    assert_text("one path", error, &["`fc.weight`"]);
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

#[test]
fn a_loaded_model_is_exported_as_it_is() {
    for recipe in [Recipe::from(delayed(16)), "rowwise".parse().unwrap()] {
        let (_vars, net) = calibrated(recipe);
        let (first, second) = (dir(), dir());
        let report = save_calibrated(&net, first.path()).unwrap();
        let loaded =
            Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
        let again = save_calibrated(&loaded, second.path()).unwrap();
        assert_eq!(
            std::fs::read(&report.model).unwrap(),
            std::fs::read(&again.model).unwrap()
        );
        assert_eq!(report.quantized, again.quantized);
        assert_eq!(report.ignored, again.ignored);
    }
}

#[test]
fn inputs_calibrated_in_another_format_are_refused() {
    let recipe = delayed(16).with_format(DelayedFormat::E5m2);
    let (_vars, net) = calibrated(recipe);
    let error = save_calibrated(&net, dir().path()).unwrap_err();
    assert_text("E5M2 inputs", error, &["blocks.0.fc1", "e5m2", "e4m3"]);
}

/// FP8 checkpoints have no form for convolutions: the report names those that compute in FP8 in memory only.
#[test]
fn the_report_names_convolutions() -> Result<(), Box<dyn std::error::Error>> {
    let device = &candle_core::Device::Cpu;
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, candle_core::DType::F32, device);
    let config = candle_nn::Conv2dConfig::default();
    let conv = fp8::nn::conv2d(3, 16, 3, config, vb.pp("conv"))?;
    let head = fp8::nn::linear(16, 16, vb.pp("head"))?;
    let model = (conv, head);
    fp8::prepare_fp8(&model, &Default::default())?;
    let x = candle_core::Tensor::randn(0f32, 1., (2, 3, 8, 8), device)?;
    let forward = || -> fp8::Result<_> {
        use candle_core::Module;
        let x = model.0.forward(&x)?.mean((2, 3))?;
        Ok(model.1.forward(&x)?)
    };
    fp8::with_fp8(
        Autocast::new(fp8::RecipeName::Rowwise).calibrating(true),
        forward,
    )?;
    let dir = tempfile::tempdir()?;
    let report = save_calibrated(&model, dir.path())?;
    assert_eq!(
        (report.quantized, report.ignored),
        (vec!["head".into()], vec![])
    );
    assert_eq!(report.convolutions, ["conv"]);
    Ok(())
}
