//! Warnings of what stays in high precision inside an enabled guard although no report says so: layers that no preparation has seen, and
//! operators that are not prepared under recipes that cast operators.

use crate::said;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::{self, Add, LayerNorm, Linear, TransformerConfig};
use fp8::{Autocast, Fp8Module, PrepareOptions, RecipeName, prepare_fp8, with_fp8};
use fp8_test_support::child::child;
use fp8_test_support::{Layer, cpu_tensor, delayed, tensor};

#[test]
fn layers_that_no_preparation_has_seen_warn_once_beside_prepared_ones() {
    let said = || said("layers that prepare_fp8 has not seen");
    assert_eq!(said(), 0);
    let x = tensor(1, &[2, 8]);
    let seen = Layer::prepared("seen", 1, 8, 8).linear;
    let hidden = Layer::new("hidden", 3, 8, 8).linear;
    let step = |autocast: Autocast, other: &Linear| {
        with_fp8(autocast, || other.forward(&seen.forward(&x)?)).unwrap();
    };

    // No warning: the report names the layer, or nothing is meant to be in FP8.
    let left_out = Layer::new("left_out", 5, 8, 8).linear;
    let options = PrepareOptions::default().with_off("left_out").unwrap();
    prepare_fp8(&left_out, &options).unwrap();
    step(delayed(4).into(), &left_out);
    step(Autocast::disabled(), &hidden);
    step(Autocast::new(delayed(4)).calibrating(true), &hidden);
    with_fp8(delayed(4), || -> Result<Tensor> {
        let y = seen.forward(&x)?;
        with_fp8(Autocast::disabled(), || hidden.forward(&y))
    })
    .unwrap();
    assert_eq!(said(), 0);

    for _ in 0..2 {
        step(delayed(4).into(), &hidden);
        assert_eq!(said(), 1);
    }
    assert_eq!(crate::said("beside prepared ones (`hidden`)"), 1);
}

#[derive(Fp8Module)]
struct Net {
    fc: Linear,
    norm: LayerNorm,
    sum: Add,
}

impl Net {
    fn prepared(options: &PrepareOptions) -> Self {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let net = Self {
            fc: nn::linear(8, 8, vb.pp("fc")).unwrap(),
            norm: nn::layer_norm(8, 1e-5, vb.pp("norm")).unwrap(),
            sum: Add::new("sum"),
        };
        prepare_fp8(&net, options).unwrap();
        net
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.operators(&self.fc.forward(x)?)
    }

    fn operators(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.sum.forward(x, &self.norm.forward(x)?)?)
    }
}

#[test]
fn operators_that_are_not_prepared_warn_once_under_recipes_that_cast_them() {
    let said = || said("casts operators too");
    assert_eq!(said(), 0);
    let x = cpu_tensor(1, &[2, 8]);
    let step = |options: PrepareOptions, autocast: Autocast| {
        let net = Net::prepared(&options);
        with_fp8(autocast, || net.forward(&x)).unwrap();
    };

    // No warning: operators are prepared or named by the report or the options, or the recipe does not cast them.
    let default = PrepareOptions::default;
    let all = || default().with_operators(true);
    let direct = || Autocast::new(RecipeName::Direct);
    step(all(), direct());
    let some = all().with_off("norm").unwrap().with_off("sum").unwrap();
    step(some, direct());
    let own = default().with_recipe("*", RecipeName::Hybrid).unwrap();
    step(own, direct());
    let off = default().with_off("*norm*").unwrap();
    step(off.with_off("sum").unwrap(), direct());
    let uncast = default().with_recipe("*", RecipeName::Rowwise).unwrap();
    step(uncast, direct());
    step(default(), RecipeName::Delayed.into());
    step(default(), direct().enabled(false));
    assert_eq!(said(), 0);

    for recipe in [RecipeName::Direct, RecipeName::Hybrid] {
        step(default(), recipe.into());
        assert_eq!(said(), 1);
    }
    assert_eq!(crate::said("not prepared (`norm`, `sum`)"), 1);
}

#[test]
fn norms_of_a_single_node_are_operators_too() {
    let said = warnings_of("unprepared::a_single_node_under_direct");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("casts operators too"), "{said:?}");
    assert!(said[0].contains("not prepared (`norm`)"), "{said:?}");
}

#[test]
#[ignore = "run by norms_of_a_single_node_are_operators_too in a child process"]
fn a_single_node_under_direct() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let config = TransformerConfig::new(8, 2);
    let block = nn::layer_norm_linear(8, 8, &config, vb).unwrap();
    prepare_fp8(&block, &PrepareOptions::default()).unwrap();
    let x = cpu_tensor(1, &[2, 3, 8]);
    with_fp8(RecipeName::Direct, || block.forward(&x)).unwrap();
}

/// Operators that are not prepared are a cause of their own: their warning does not replace that of the layers.
#[test]
fn a_guard_without_any_fp8_says_why() {
    let said = warnings_of("unprepared::only_operators_run");
    assert_eq!(said.len(), 2, "{said:?}");
    let why = "without any FP8; no layer of this library ran in it";
    assert!(said[0].contains(why), "{said:?}");
    assert!(said[1].contains("casts operators too"), "{said:?}");
    let said = warnings_of("unprepared::only_a_layer_that_is_left_out_runs");
    assert_eq!(said.len(), 1, "{said:?}");
    let why = "without any FP8; prepare_fp8 has left out the layers that ran in it (`fc`)";
    assert!(said[0].contains(why), "{said:?}");
}

#[test]
#[ignore = "run by a_guard_without_any_fp8_says_why in a child process"]
fn only_operators_run() {
    let net = Net::prepared(&PrepareOptions::default());
    let x = cpu_tensor(1, &[2, 8]);
    with_fp8(RecipeName::Hybrid, || net.operators(&x)).unwrap();
}

#[test]
#[ignore = "run by a_guard_without_any_fp8_says_why in a child process"]
fn only_a_layer_that_is_left_out_runs() {
    let net = Net::prepared(&PrepareOptions::default().with_off("fc").unwrap());
    let x = cpu_tensor(1, &[2, 8]);
    with_fp8(RecipeName::Delayed, || net.forward(&x)).unwrap();
}

/// The warnings of a test in a process of its own, which keeps no log.
fn warnings_of(test: &str) -> Vec<String> {
    let output = child(test).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let warnings = errors.lines().filter(|line| line.starts_with("warning: "));
    warnings.map(str::to_string).collect()
}
