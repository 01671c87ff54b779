//! Activations in bf16 beside parameters in f32.

use super::support::{Model, RECIPES, Step, assert_steps, config, input, tolerance};
use candle_core::DType;
use fp8_recipes::nn::NormKind;
use fp8_test_support::flat64;

/// The gradients that flow through the sum of those of q, k and v, which the forms add in another order.
const SUMS: [&str; 2] = ["x", "input_layernorm"];

/// The distance of two tensors over the norm of the second one.
fn distance(got: &Step, want: &Step, name: &str) -> f64 {
    let (got, want) = (flat64(&got.all[name]), flat64(&want.all[name]));
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let far = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b));
    far / norm(&mut want.iter().copied())
}

#[test]
fn a_layer_computes_in_the_dtype_of_its_input() {
    for norm in [NormKind::LayerNorm, NormKind::RmsNorm] {
        let config = config().with_norm(norm);
        for recipe in RECIPES {
            let run_in = |recipe: Option<&str>, single: bool, dtype: DType| {
                let model = Model::prepared(&config, single, DType::F32);
                // Twice, so that delayed scales count.
                model.step(&input(dtype), &Default::default(), recipe);
                model.step(&input(dtype), &Default::default(), recipe)
            };
            let run = |single: bool, dtype: DType| run_in(Some(recipe), single, dtype);
            let case = format!("{norm:?}, {recipe}");
            let (one, apart) = (run(true, DType::BF16), run(false, DType::BF16));
            assert_steps(&case, &one, &apart, &SUMS, tolerance(DType::BF16));
            let wide = run(true, DType::F32);
            let exact = run_in(None, true, DType::F32);
            for (name, tensor) in &one.all {
                let dtype = match name.as_str() {
                    "x" | "y" => DType::BF16,
                    _ => DType::F32,
                };
                assert_eq!(tensor.dtype(), dtype, "{case}: {name}");
                // Rounded to bf16, some values go to the next code of FP8, which changes about as much as FP8 itself. The gradient of
                // the keys' bias is 0 but for roundings.
                if name != "layer.self_attn.k_proj.bias" {
                    let (far, of_fp8) =
                        (distance(&one, &wide, name), distance(&wide, &exact, name));
                    let bound = 2. * of_fp8 + 0.01;
                    assert!(far < bound, "{case}: {name}: {far}, {of_fp8}");
                }
            }
        }
    }
}
