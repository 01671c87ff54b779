//! Preparation, reports, the weight cache, exports and files of dense layers.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::checkpoint::{cast_counts, load_fp8_state, save_fp8_state};
use fp8_recipes::config::{DelayedScaling, Operand};
use fp8_recipes::load::var_builder;
use fp8_recipes::nn::{self, DenseConfig, DenseGeneral};
use fp8_recipes::{
    Autocast, ExportOptions, Fp8LinearConfig, Fp8Module, LayerKind, PrepareOptions, RecipeName,
    Role, end_step, prepare_fp8, save_calibrated_with, with_fp8,
};
use fp8_test_support::{assert_same, device, skipped_on_cuda, tensor};

type Done = Result<(), Box<dyn std::error::Error>>;

/// Attention's projections in flax's shapes, and one product for each of two experts.
#[derive(Fp8Module)]
struct Net {
    query: DenseGeneral,
    out: DenseGeneral,
    experts: DenseGeneral,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> fp8_recipes::Result<Self> {
        let query = DenseConfig::new([4, 8]).with_seed(1);
        let out = DenseConfig::new([16]).with_axis([-2, -1]).with_seed(2);
        let experts = DenseConfig::new([16]).with_batch_axis([0]).with_seed(3);
        Ok(Self {
            query: nn::dense_general(&[2, 5, 16], query, vb.pp("attention.query"))?,
            out: nn::dense_general(&[2, 5, 4, 8], out, vb.pp("attention.out"))?,
            experts: nn::dense_general(&[2, 5, 16], experts, vb.pp("experts"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.experts
            .forward(&self.out.forward(&self.query.forward(x)?)?)
    }
}

fn net() -> fp8_recipes::Result<(VarMap, Net)> {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device()))?;
    Ok((vars, net))
}

fn recipe() -> DelayedScaling {
    DelayedScaling::default().with_amax_history_len(4)
}

fn evaluate(net: &Net, x: &Tensor) -> candle_core::Result<Tensor> {
    with_fp8(Autocast::new(recipe()).training(false), || net.forward(x))
}

fn train(net: &Net, vars: &VarMap, seed: u64) -> candle_core::Result<()> {
    let y = with_fp8(recipe(), || net.forward(&tensor(seed, &[2, 5, 16])))?;
    let grads = fp8_recipes::backward(&y.sqr()?.sum_all()?)?;
    for var in vars.all_vars() {
        let grad = grads.get(&var).expect("a gradient");
        var.set(&(var.as_tensor() - (grad * 1e-3)?)?.detach())?;
    }
    Ok(())
}

#[test]
fn reports_say_what_each_layer_is() -> Done {
    let (_vars, net) = net()?;
    let report = prepare_fp8(&net, &PrepareOptions::default())?;
    let rows = report.layers.iter().map(|layer| {
        let path = layer.path.clone().unwrap_or_default();
        (path, layer.kind, layer.out_features, layer.in_features)
    });
    let expected = [
        ("attention.query", LayerKind::Linear, 32, 16),
        ("attention.out", LayerKind::Linear, 16, 32),
        ("experts", LayerKind::BatchedLinear, 16, 16),
    ];
    let expected = expected.map(|(path, kind, n, k)| (path.to_string(), kind, n, k));
    assert_eq!(rows.collect::<Vec<_>>(), expected);
    assert_eq!(report.converted(), 3);
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed);
    let table = report.cast_table(config)?;
    assert!(table.to_string().contains("experts"), "{table}");
    let off = prepare_fp8(&net, &PrepareOptions::default().with_off("experts")?)?;
    assert_eq!(off.converted(), 2, "{off}");
    assert!(net.experts.fp8_state().is_none());
    Ok(())
}

/// A kernel is cast once for each change, in micro-batches and evaluation too.
#[test]
fn the_kernel_is_cast_once_for_each_change() -> Done {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return Ok(());
    }
    let (vars, net) = net()?;
    prepare_fp8(&net, &PrepareOptions::default())?;
    let casts = || cast_counts(&net)[&Operand::Weight];
    let x = tensor(1, &[2, 5, 16]);
    for _ in 0..2 {
        with_fp8(recipe(), || net.forward(&x))?;
    }
    end_step()?;
    // Codes of the initial scale are replaced when the first is known.
    with_fp8(recipe(), || net.forward(&x))?;
    let before = casts();
    for _ in 0..3 {
        with_fp8(recipe(), || net.forward(&x))?;
    }
    assert_eq!(casts(), before);
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * 2.)?.detach())?;
    }
    with_fp8(recipe(), || net.forward(&x))?;
    assert_eq!(casts(), before + 3);
    Ok(())
}

/// A kernel that changes between a forward pass and its backward pass is an error, where the backward pass reads it again.
#[test]
fn a_kernel_that_changes_before_the_backward_pass_is_noticed() -> Done {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return Ok(());
    }
    for batch_axis in [vec![], vec![0]] {
        let dims: &[usize] = if batch_axis.is_empty() {
            &[16, 8]
        } else {
            &[2, 16, 8]
        };
        let kernel = Var::from_tensor(&tensor(1, dims))?;
        let config = DenseConfig::new([8])
            .with_bias(false)
            .with_batch_axis(batch_axis);
        let layer = DenseGeneral::new(kernel.as_tensor().clone(), None, config)?.with_path("fc");
        prepare_fp8(&layer, &PrepareOptions::default())?;
        let x = Var::from_tensor(&tensor(2, &[2, 3, 16]))?;
        let y = with_fp8("rowwise", || layer.forward(&x))?;
        kernel.set(&(kernel.as_tensor() * 2.)?.detach())?;
        let error = fp8_recipes::backward(&y.sum_all()?).expect_err("a changed kernel");
        assert!(error.to_string().contains("fc"), "{error}");
    }
    Ok(())
}

/// The file holds matrices, and the loaded layers compute what the calibrated ones do.
#[test]
fn an_export_is_read_back() -> Done {
    let (vars, net) = net()?;
    prepare_fp8(&net, &PrepareOptions::default())?;
    with_fp8(Autocast::new(recipe()).calibrating(true), || {
        net.forward(&tensor(1, &[2, 5, 16]))
    })?;
    let dir = tempfile::tempdir()?;
    let options = ExportOptions::new().with_vars(&vars);
    let report = save_calibrated_with(&net, dir.path(), &options);
    // Every variable is in the file, under another name and shape.
    let report = report?;
    assert_eq!(report.quantized, ["attention.query", "attention.out"]);
    assert_eq!(report.convolutions, ["experts"]);
    let stored = candle_core::safetensors::load(&report.model, &Device::Cpu)?;
    assert_eq!(stored["attention.query.weight"].dims(), [32, 16]);
    assert_eq!(stored["attention.query.weight"].dtype(), DType::F8E4M3);
    assert_eq!(stored["attention.query.bias"].dims(), [32]);
    assert_eq!(stored["experts.kernel"].dims(), [2, 16, 16]);

    let loaded = Net::new(var_builder(&[&report.model], DType::F32, &device())?)?;
    assert!(loaded.query.static_weight().is_some() && loaded.experts.static_weight().is_none());
    assert_eq!(loaded.query.kernel()?.dims(), [16, 4, 8]);
    // Prepared, the experts compute in high precision on both sides only outside a guard.
    net.experts_off()?;
    for seed in 5..8 {
        let x = tensor(seed, &[2, 5, 16]);
        let expected = evaluate(&net, &x)?;
        assert_same("loaded", &loaded.forward(&x)?, &expected);
        let high = with_fp8(Autocast::disabled(), || loaded.forward(&x))?;
        fp8_test_support::assert_differ("decoded", &high, &expected);
        fp8_test_support::assert_close("decoded", &high, &expected, 0.1);
    }
    Ok(())
}

impl Net {
    fn experts_off(&self) -> fp8_recipes::Result<()> {
        prepare_fp8(self, &PrepareOptions::default().with_off("experts")?).map(drop)
    }
}

/// A file with weights and FP8 state, under the names of the variables.
#[test]
fn a_state_file_restores_the_model() -> Done {
    let (vars, trained) = net()?;
    prepare_fp8(&trained, &PrepareOptions::default())?;
    for seed in 0..3 {
        train(&trained, &vars, seed)?;
    }
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    save_fp8_state(&path, &trained)?;
    let stored = candle_core::safetensors::load(&path, &Device::Cpu)?;
    assert_eq!(stored["attention.query.kernel"].dims(), [16, 4, 8]);
    let (_vars, loaded) = net()?;
    prepare_fp8(&loaded, &PrepareOptions::default())?;
    load_fp8_state(&path, &loaded)?;
    let x = tensor(9, &[2, 5, 16]);
    assert_same(
        "evaluation",
        &evaluate(&loaded, &x)?,
        &evaluate(&trained, &x)?,
    );
    let state = loaded.experts.fp8_state().ok_or("no state")?;
    let history = state
        .slot(Role::Weight)
        .ok_or("no slot")?
        .tensors()?
        .amax_history;
    assert!(fp8_test_support::flat(&history)[0] > 0.);
    Ok(())
}
