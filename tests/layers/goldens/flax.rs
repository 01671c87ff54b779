//! The casts and the delayed layer of flax.

use super::*;
use candle_core::{DType, Result, Tensor, Var};
use fp8::fp8_candle::{Quantizer, ScaleSource, fake_quantize};
use fp8::fp8_core::{Contraction, Format, Granularity};
use fp8::{DelayedScaling, Role};
use fp8_test_support::{
    Model, assert_same, assert_within, device, flat64, largest, on_cuda, rounding, sqnr, ulp,
};

/// flax divides by a scale rounded to the compute dtype, in that dtype, and clips before the cast. In f32 this equals our
/// cast to the bit, and in bf16 too if the scale is a power of two. Other scales in bf16 move a value by up to one code.
#[test]
fn flax_quantize_dequantize() -> Result<()> {
    let tensors = load_tensors("flax_fp8dense.safetensors");
    for (dtype, dtype_name) in [(DType::F32, "f32"), (DType::BF16, "bf16")] {
        let x = tensors[&format!("qdq.{dtype_name}.x")].to_dtype(dtype)?;
        for format in [Format::E4M3, Format::E5M2] {
            for scale in ["0.01", "0.125", "1.0", "37.5"] {
                let key = format!("qdq.{dtype_name}.{format}.{scale}");
                let dequant_scale: f32 = scale.parse().unwrap();
                let source = ScaleSource::Fixed {
                    dequant_scale: Tensor::from_slice(&[dequant_scale], 1, &device())?,
                };
                let quantizer =
                    Quantizer::dynamic(format, Granularity::Tensorwise).with_source(source);
                let ours = fake_quantize(&x, &quantizer, Contraction::Cols)?;
                let theirs = tensors[&key].to_dtype(dtype)?;
                if dtype == DType::F32 || scale == "0.125" || scale == "1.0" {
                    assert_same(&key, &ours, &theirs);
                    continue;
                }
                // At most one step of the format, and the rounding to bf16 of equal codes.
                let bits = if format == Format::E4M3 { 3 } else { 2 };
                let subnormal = f64::from(dequant_scale) * f64::from(format.decode(1));
                let rounding = |value: f64| 2. * ulp(dtype, value);
                assert_within(&key, &ours, &theirs, |_, value| {
                    subnormal.max(value.abs() * 2f64.powi(-bits)) + rounding(value)
                });
                let pairs: Vec<_> = flat64(&ours).into_iter().zip(flat64(&theirs)).collect();
                let same = pairs
                    .iter()
                    .filter(|(a, b)| (a - b).abs() <= rounding(*b))
                    .count();
                assert!(
                    same * 20 >= 19 * pairs.len(),
                    "{key}: {same} of {} codes",
                    pairs.len()
                );
            }
        }
    }
    Ok(())
}

/// flax stores dequantization scales and computes them at the start of a step, from the history before it. We store
/// quantization scales and compute them at the end, from the history that now includes the step. So flax's `*_scale`
/// after step t is the reciprocal of ours before step t, while `*_amax_history` after step t is ours after step t.
/// flax's kernel and its gradient have shape `[in, out]`. The kernel stays the same over the six steps.
#[test]
fn flax_delayed_dense() -> Result<()> {
    let tensors = load_tensors("flax_fp8dense.safetensors");
    for (dtype, dtype_name) in [(DType::F32, "f32"), (DType::BF16, "bf16")] {
        for mode in ["direct", "qdq"] {
            let case = format!("dense.{mode}.{dtype_name}.h1");
            let get = |name: &str| tensors[&format!("{case}.{name}")].to_dtype(dtype);
            // flax casts its f32 parameters to the compute dtype before anything else.
            let weight = Var::from_tensor(&get("kernel")?.t()?.contiguous()?)?;
            let bias = Var::from_tensor(&get("bias")?)?;
            let model = Model::prepared(&weight, Some(&bias));
            let state = model.l.fp8_state().unwrap().clone();
            let slots = [
                ("input", state.slot(Role::Input).unwrap()),
                ("kernel", state.slot(Role::Weight).unwrap()),
                ("output_grad", state.slot(Role::GradOutput).unwrap()),
            ];
            let recipe = DelayedScaling::default().with_amax_history_len(1);
            for t in 0..6 {
                let stored = |name: &str| &tensors[&format!("{case}.t{t}.{name}")];
                for (name, slot) in slots {
                    let what = format!("{case} {name} scale of step {t}");
                    let theirs = stored(&format!("{name}_scale"));
                    assert_same(&what, &slot.tensors()?.dequant_scale, theirs);
                }
                let x = Var::from_tensor(&get(&format!("t{t}.x"))?)?;
                let step = model.step(&x, &get(&format!("t{t}.g"))?, recipe.clone())?;
                for (name, slot) in slots {
                    let what = format!("{case} {name} history after step {t}");
                    let theirs = stored(&format!("{name}_amax_history"));
                    assert_same(&what, &slot.tensors()?.amax_history, theirs);
                }
                for (name, ours) in [
                    ("y", step.y.clone()),
                    ("gx", step.grad_x().clone()),
                    ("gk", step.grad_weight().t()?),
                    ("gb", step.grad_bias().clone()),
                ] {
                    let what = format!("{case} {name} of step {t}");
                    let theirs = stored(name).to_dtype(dtype)?;
                    if dtype == DType::F32 {
                        let terms = weight.dims().iter().chain(x.dims()).max();
                        let terms = *terms.expect("dimensions");
                        let bound = rounding::two_products(&[terms]) * largest(&theirs);
                        assert_within(&what, &ours, &theirs, |_, _| bound);
                    } else {
                        // In bf16, flax rounds scales, scaled values and products to bf16.
                        // flax sums up the bias gradient in bf16. Products of FP8 tensor cores are within 60 dB of exact ones (see
                        // `rounding::least_sqnr_of_tensor_cores`); some then round to the neighbouring bf16 number, which leaves
                        // about 57 dB.
                        let floor = match (name, t) {
                            ("gb", _) => 40.,
                            (_, 0) if on_cuda() => 55.,
                            (_, 0) => 60.,
                            _ => 25.,
                        };
                        let got = sqnr(&theirs, &ours);
                        assert!(got >= floor, "{what}: {got:.1} dB");
                    }
                }
            }
        }
    }
    Ok(())
}
