//! A batch norm absorbed by the convolution before it, which gradients go through.

use candle_core::{DType, Device, Module, Tensor, Var};
use fp8_recipes::nn::{self, Conv2dConfig, ModuleT};
use fp8_recipes::scaled::ScaledVarMap;
use fp8_scaled::ScaledVar;
use fp8_test_support::rounding::two_orders;
use fp8_test_support::{assert_close, assert_text, cpu_tensor};

const CPU: &Device = &Device::Cpu;

/// Mean and variance.
fn statistics(features: usize) -> [Tensor; 2] {
    let variance = cpu_tensor(2, &[features]).affine(0.4, 1.).unwrap();
    [cpu_tensor(1, &[features]), variance]
}

fn norm(features: usize) -> nn::BatchNorm {
    let ([mean, variance], shape) = (statistics(features), [features]);
    let (weight, bias) = (cpu_tensor(3, &shape), cpu_tensor(4, &shape));
    nn::BatchNorm::new(features, mean, variance, weight, bias, 1e-3).unwrap()
}

#[test]
fn one_convolution_computes_what_the_two_layers_do() {
    let config = Conv2dConfig {
        padding: 1,
        groups: 2,
        ..Default::default()
    };
    for bias in [true, false] {
        let weight = Var::from_tensor(&cpu_tensor(5, &[6, 2, 3, 3])).unwrap();
        let bias = bias.then(|| cpu_tensor(6, &[6]));
        let conv = nn::Conv2d::new(weight.as_tensor().clone(), bias, config).with_path("conv");
        let bn = norm(6);
        let x = cpu_tensor(7, &[2, 4, 5, 6]);
        let two = bn.forward_t(&conv.forward(&x).unwrap(), false).unwrap();
        let absorbed = conv.absorb_bn(&bn).unwrap();
        assert_eq!(absorbed.path(), Some("conv"));
        let one = absorbed.forward(&x).unwrap();
        // Two channels of 9 weights, a bias, and four steps of the norm.
        let roundings = 2 * 9 + 1 + 4;
        assert_close("absorbed", &one, &two, two_orders(roundings));
        let gradient = |y: &Tensor| {
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            grads.get(&weight).unwrap().clone()
        };
        // Sums of 2 * 5 * 6 of them.
        let bound = two_orders(2 * roundings + 2 * 5 * 6);
        assert_close("gradient", &gradient(&one), &gradient(&two), bound);
    }
}

#[test]
fn norms_that_do_not_fit_are_refused() {
    let conv = nn::Conv2d::new(cpu_tensor(5, &[6, 4, 3, 3]), None, Default::default());
    let error = conv.absorb_bn(&norm(5)).unwrap_err();
    assert_text(
        "another number of channels",
        error,
        &["size 5", "[6, 1, 1, 1]"],
    );
    let [mean, variance] = statistics(6);
    let plain = nn::BatchNorm::new_no_bias(6, mean, variance, 1e-3).unwrap();
    let error = conv.absorb_bn(&plain).unwrap_err();
    assert_text("no weight and bias", error, &["weight_and_bias"]);
}

/// The data of scaled parameters are not their values, and gradients do not reach them through values.
#[test]
fn scaled_parameters_are_refused_by_name() {
    let vars = ScaledVarMap::new(DType::F32, CPU).unwrap();
    let vb = vars.var_builder();
    let conv = nn::conv2d(4, 6, 3, Default::default(), vb.pp("conv")).unwrap();
    let scale = ScaledVar::of(conv.weight()).unwrap().scale();
    assert_ne!(scale.to_f32(), 1.);
    let bn = nn::batch_norm(6, 1e-3, vb.pp("bn")).unwrap();
    let plain_conv = nn::Conv2d::new(cpu_tensor(5, &[6, 4, 3, 3]), None, Default::default());
    let plain_norm = norm(6);
    for (conv, bn, tensor) in [
        (&conv, &plain_norm, "conv.weight"),
        (&plain_conv, &bn, "bn.running_mean"),
    ] {
        let error = conv.absorb_bn(bn).unwrap_err();
        let which = format!("`{tensor}` is a scaled parameter");
        let parts = ["nn::Conv2d::absorb_bn", "call nn::fuse_batch_norm"];
        assert_text(tensor, &error, &[&which]);
        assert_text(tensor, &error, &parts);
    }
}
