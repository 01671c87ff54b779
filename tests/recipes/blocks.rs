//! Microscaling casts against torchao, blocks against DeepSeek. `tests/golden/blocks.py` made the data.

use candle_core::{DType, Module, Tensor, Var};
use fp8::config::{CastConfig, Fp8LinearConfig, Gemm, ResolvedConfig};
use fp8::fp8_candle::{Fp8Tensor, Quantizer};
use fp8::fp8_core::{Contraction, E8M0, Format, Granularity};
use fp8::{Recipe, RecipeName, fp8_autocast};
use fp8_test_support::{Layer, device, flat, golden, tensor};
use std::collections::HashMap;

fn goldens() -> HashMap<String, Tensor> {
    candle_core::safetensors::load(golden("blocks.safetensors"), &device()).unwrap()
}

fn config(name: RecipeName) -> ResolvedConfig {
    Recipe::from(name).resolve().unwrap()
}

fn cast(x: &Tensor, granularity: Granularity, power_of_two: bool) -> Fp8Tensor {
    let quantizer = Quantizer::dynamic(Format::E4M3, granularity).with_power_of_two(power_of_two);
    Fp8Tensor::quantize(x, &quantizer, Contraction::Cols).unwrap()
}

fn bytes(x: &Tensor) -> Vec<u8> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Fails if elements differ; the message counts them and shows the first.
#[track_caller]
fn assert_equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], expected: &[T]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let differing: Vec<_> = (0..got.len()).filter(|&i| got[i] != expected[i]).collect();
    if let Some(&i) = differing.first() {
        panic!(
            "{what}: {} of {} differ, first element {i}: {:?}, expected {:?}",
            differing.len(),
            got.len(),
            got[i],
            expected[i]
        );
    }
}

#[test]
fn mxfp8_casts_as_torchao() {
    let golden = goldens();
    let config = config(RecipeName::Mxfp8);
    for gemm in Gemm::ALL {
        for operand in gemm.operands() {
            let cast = config.cast(operand);
            assert_eq!(
                (cast.granularity, cast.format),
                (Granularity::Mx, Some(Format::E4M3))
            );
        }
    }
    for dtype in ["f32", "bf16"] {
        let x = &golden["x"];
        let x = match dtype {
            "f32" => x.clone(),
            _ => x.to_dtype(DType::BF16).unwrap(),
        };
        let ours = cast(&x, Granularity::Mx, config.round_scales_to_power_of_two);
        let scales: Vec<u8> = flat(ours.dequant_scale())
            .iter()
            .map(|&scale| E8M0::from_f32(scale).to_bits())
            .collect();
        let expected = &golden[&format!("mx_{dtype}.scale")];
        assert_equal(&format!("{dtype} scales"), &scales, &bytes(expected));
        let expected = &golden[&format!("mx_{dtype}.codes")];
        assert_equal(
            &format!("{dtype} codes"),
            &bytes(ours.codes()),
            &bytes(expected),
        );
    }
}

#[test]
fn blockwise_casts_as_deepseek() {
    let golden = goldens();
    let config = config(RecipeName::Blockwise);
    let power_of_two = config.round_scales_to_power_of_two;
    assert!(power_of_two);
    for (name, granularity) in [
        ("token", config.input.granularity),
        ("token", config.grad_output.granularity),
        ("block", config.weight.granularity),
    ] {
        let ours = cast(&golden["x"], granularity, power_of_two);
        let scales = &golden[&format!("{name}_ue8m0.scale")];
        let codes = &golden[&format!("{name}_ue8m0.codes")];
        // DeepSeek takes amaxes below 1e-4 for that; ours are exact down to 1e-12.
        let least = (1e-4f32 / 448.).log2().ceil().exp2();
        let ours_scales: Vec<f32> = flat(ours.dequant_scale())
            .iter()
            .map(|scale| scale.max(least))
            .collect();
        assert_equal(&format!("{name} scales"), &ours_scales, &flat(scales));
        let clamped: Vec<bool> = flat(ours.dequant_scale())
            .iter()
            .map(|&s| s < least)
            .collect();
        let grid = ours.grid();
        let kept = |codes: &[u8]| -> Vec<u8> {
            let codes = codes.iter().enumerate();
            let codes =
                codes.filter(|(i, _)| !clamped[grid.index(i / grid.cols(), i % grid.cols())]);
            codes.map(|(_, &code)| code).collect()
        };
        let (got, expected) = (kept(&bytes(ours.codes())), kept(&bytes(codes)));
        assert!(got.len() > 2 * clamped.len(), "most blocks are compared");
        assert_equal(&format!("{name} codes"), &got, &expected);
    }
}

/// Block sizes that fit no tile of a processor, alone and against one scale per tensor.
#[test]
fn large_gradients_stay_finite_in_odd_blocks() {
    let kinds = [
        CastConfig::dynamic_blockwise(3, 5),
        CastConfig::dynamic_tensorwise(),
    ];
    // Far below the largest f32.
    let go = (tensor(3, &[6, 20]) * 1e36).unwrap();
    for combination in 0..8 {
        let kind = |operand: usize| kinds[combination >> operand & 1];
        let config = Fp8LinearConfig::default()
            .with_input(kind(0))
            .with_weight(kind(1))
            .with_grad_output(kind(2));
        let layer = Layer::prepared("fc", 1, 20, 30);
        let x = Var::from_tensor(&tensor(2, &[6, 30])).unwrap();
        let guard = fp8_autocast(config).unwrap();
        let y = layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
        let grads = (y * &go).unwrap().sum_all().unwrap().backward().unwrap();
        for (name, var) in [("x", &x), ("weight", &layer.weight)] {
            let grad = flat(grads.get(var).unwrap());
            let finite = grad.iter().filter(|value| value.is_finite()).count();
            assert_eq!(finite, grad.len(), "{name}, combination {combination}");
        }
    }
}
