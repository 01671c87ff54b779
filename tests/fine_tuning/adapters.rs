//! Adapters on a frozen FP8 base.

use crate::support::*;
use candle_core::{DType, Module, Tensor, Var};
use candle_nn::{Init, Optimizer, VarBuilder, VarMap};
use fp8_recipes::nn::Linear;
use fp8_recipes::optim::{AdamW, AdamWConfig};
use fp8_recipes::{Fp8Layer, check_gradients, with_fp8};

/// `y = base(x) + 2 (x a^T) b^T`
struct Lora {
    base: Linear,
    a: Tensor,
    b: Tensor,
}

impl Lora {
    fn new(base: Linear, vb: VarBuilder<'_>) -> Self {
        let (out, inp) = base.features();
        Self {
            base,
            a: vb.get_with_hints((4, inp), "a", Init::Const(0.)).unwrap(),
            b: vb.get_with_hints((out, 4), "b", Init::Const(0.)).unwrap(),
        }
    }

    fn adapter(&self, x: &Tensor) -> Tensor {
        let x = x.matmul(&self.a.t().unwrap()).unwrap();
        (x.matmul(&self.b.t().unwrap()).unwrap() * 2.).unwrap()
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.base.forward(x)? + self.adapter(x)
    }
}

#[test]
fn gradients_pass_through_a_static_layer_and_reach_input_and_adapters() -> Outcome {
    let dir = tempfile::tempdir()?;
    let [up, _] = load(&fp8_file(dir.path(), 1));
    // The base holds codes and a scale, and nothing in high precision.
    let weight = up.static_weight().ok_or("the layer is not FP8")?;
    assert_eq!(Fp8Layer::weight_bytes(&up), HIDDEN * IN + 4);
    let dequantized = weight.codes().dequantize(DType::F32)?;
    let adapters = VarMap::new();
    let vb = VarBuilder::from_varmap(&adapters, DType::F32, &device());
    let lora = Lora::new(up, vb.pp("up"));
    for (i, (_, var)) in named(&adapters).iter().enumerate() {
        var.set(&(tensor(10 + i as u64, var.dims()) * 0.1)?)?;
    }
    let x = Var::from_tensor(&tensor(20, &[8, IN]))?;
    let target = tensor(21, &[8, HIDDEN]);
    let loss = |y: &Tensor| (y - &target)?.sqr()?.mean_all();
    for guarded in [false, true] {
        let case = format!("guarded: {guarded}");
        let y = match guarded {
            false => lora.forward(&x)?,
            true => with_fp8(delayed(), || lora.forward(&x))?,
        };
        let grads = loss(&y)?.backward()?;
        assert!(check_gradients(&adapters, &grads).is_empty(), "{case}");
        let of = |tensor: &Tensor| grads.get(tensor).cloned().ok_or("no gradient");

        // The chain rule by hand; to its gradient the base is linear, whatever the cast of its input has rounded.
        let grad_y = ((y.detach() - &target)? * (2. / y.elem_count() as f64))?;
        let (a, b, x_values) = (lora.a.detach(), lora.b.detach(), x.as_detached_tensor());
        let grad_b = (grad_y.t()?.matmul(&x_values.matmul(&a.t()?)?)? * 2.)?;
        let grad_a = (grad_y.matmul(&b)?.t()?.matmul(&x_values)? * 2.)?;
        let through = (grad_y.matmul(&b)?.matmul(&a)? * 2.)?;
        let grad_x = (grad_y.matmul(&dequantized)? + through)?;
        assert_close(&format!("{case}, b"), &of(&lora.b)?, &grad_b, 1e-5);
        assert_close(&format!("{case}, a"), &of(&lora.a)?, &grad_a, 1e-5);
        assert_close(&format!("{case}, x"), &of(&x)?, &grad_x, 1e-5);
    }
    Ok(())
}

#[test]
fn adapters_learn_and_the_base_stays() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = fp8_file(dir.path(), 1);
    let adapters = VarMap::new();
    let vb = VarBuilder::from_varmap(&adapters, DType::F32, &device());
    let [up, down] = load(&path);
    let [up, down] = [Lora::new(up, vb.pp("up")), Lora::new(down, vb.pp("down"))];
    for (i, (name, var)) in named(&adapters).iter().enumerate() {
        if name.ends_with(".a") {
            var.set(&(tensor(10 + i as u64, var.dims()) * 0.1)?)?;
        }
    }
    let x = tensor(20, &[64, IN]);
    let forward = || -> candle_core::Result<Tensor> { down.forward(&up.forward(&x)?.relu()?) };
    // Adapters that are zero change nothing.
    let before = self::forward(&load(&path), &x);
    assert_eq!(flat(&forward()?), flat(&before));
    // Something that adapters can learn: the base and a matrix of rank 2.
    let off = x
        .matmul(&tensor(21, &[IN, 2]))?
        .matmul(&tensor(22, &[2, IN]))?;
    let target = (&before + (off * 0.05)?)?;
    let loss = || (forward()? - &target)?.sqr()?.mean_all();
    let config = AdamWConfig {
        lr: 5e-3,
        weight_decay: 0.,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_varmap(&adapters, config)?;
    let first = loss()?.to_scalar::<f32>()?;
    for _ in 0..60 {
        optimizer.step(&loss()?.backward()?)?;
    }
    let last = loss()?.to_scalar::<f32>()?;
    assert!(last < 0.8 * first, "{first} to {last}");
    let codes = |linear: &Linear| {
        let weight = linear.static_weight().unwrap().codes().codes();
        weight.flatten_all().unwrap().to_vec1::<u8>().unwrap()
    };
    let [fresh_up, fresh_down] = load(&path);
    assert_eq!(codes(&up.base), codes(&fresh_up));
    assert_eq!(codes(&down.base), codes(&fresh_down));
    Ok(())
}
