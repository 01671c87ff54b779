//! Adapters on a frozen FP8 base.

use crate::support::*;
use candle_core::{DType, Module, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8_recipes::nn::{Linear, LoraConfig, LoraLinear, LoraUpdate};
use fp8_recipes::optim::{AdamW, AdamWConfig};
use fp8_recipes::{Fp8Layer, check_gradients, with_fp8};

/// `y = base(x) + 2 (x a^T) b^T`
fn lora(base: Linear, vb: VarBuilder<'_>) -> LoraLinear {
    LoraLinear::new(base, LoraConfig::new(4).with_alpha(8.), vb).unwrap()
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
    let lora = lora(up, vb.pp("up"));
    let [a, b] = lora.adapters();
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

        // The chain rule by hand. The base counts as linear: its gradient ignores the rounding of its input.
        let grad_y = ((y.detach() - &target)? * (2. / y.elem_count() as f64))?;
        let (a_values, b_values, x_values) = (a.detach(), b.detach(), x.as_detached_tensor());
        let grad_b = (grad_y.t()?.matmul(&x_values.matmul(&a_values.t()?)?)? * 2.)?;
        let grad_a = (grad_y.matmul(&b_values)?.t()?.matmul(&x_values)? * 2.)?;
        let through = (grad_y.matmul(&b_values)?.matmul(&a_values)? * 2.)?;
        let grad_x = (grad_y.matmul(&dequantized)? + through)?;
        // Over the features, the adapters' ranks and 8 samples.
        let sums = two_products(&[IN, HIDDEN, 8, 8]);
        assert_close(&format!("{case}, b"), &of(b)?, &grad_b, sums);
        assert_close(&format!("{case}, a"), &of(a)?, &grad_a, sums);
        assert_close(&format!("{case}, x"), &of(&x)?, &grad_x, sums);
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
    let [up, down] = [lora(up, vb.pp("up")), lora(down, vb.pp("down"))];
    for (i, (name, var)) in named(&adapters).iter().enumerate() {
        if name.ends_with("lora_A.weight") {
            var.set(&(tensor(10 + i as u64, var.dims()) * 0.1)?)?;
        }
    }
    let x = tensor(20, &[64, IN]);
    let forward = || -> candle_core::Result<Tensor> { down.forward(&up.forward(&x)?.relu()?) };
    // Zero adapters change nothing.
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
    assert_eq!(codes(up.base()), codes(&fresh_up));
    assert_eq!(codes(down.base()), codes(&fresh_down));
    Ok(())
}

#[test]
fn adapters_take_inputs_of_any_rank_freeze_a_base_in_high_precision_and_merge() -> Outcome {
    let dir = tempfile::tempdir()?;
    let [fp8, _] = load(&fp8_file(dir.path(), 1));
    let frozen = VarMap::new();
    let vb = VarBuilder::from_varmap(&frozen, DType::F32, &device());
    let plain = fp8_recipes::nn::linear(IN, HIDDEN, vb.pp("up"))?;
    for (case, base) in [("fp8", fp8), ("high precision", plain)] {
        let adapters = VarMap::new();
        let vb = VarBuilder::from_varmap(&adapters, DType::F32, &device());
        let lora = lora(base.clone(), vb.pp("up"));
        assert_eq!(
            named(&adapters)
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>(),
            ["up.lora_A.weight", "up.lora_B.weight"]
        );
        for (i, (_, var)) in named(&adapters).iter().enumerate() {
            var.set(&(tensor(10 + i as u64, var.dims()) * 0.1)?)?;
        }
        let x = tensor(20, &[2, 3, IN]);
        let y = lora.forward(&x)?;
        let rows = lora.forward(&x.reshape((6, IN))?)?;
        let grads = y.sqr()?.sum_all()?.backward()?;
        assert!(check_gradients(&adapters, &grads).is_empty(), "{case}");
        assert_eq!(
            check_gradients(&frozen, &grads).len(),
            frozen.all_vars().len()
        );
        assert_eq!(y.dims(), [2, 3, HIDDEN], "{case}");
        // A scale for the tensor of the inputs is the same in both.
        let sums = two_products(&[IN, 8]);
        assert_close(case, &rows.reshape(y.dims())?, &y, sums);
        let one = lora.forward(&x.get(0)?.get(0)?)?;
        assert_eq!(one.dims(), [HIDDEN], "{case}");
        let dropped = lora.forward_t(&x, true)?;
        assert_eq!(flat(&dropped), flat(&y), "{case}");

        let merged = lora.merge()?;
        assert_eq!(
            (merged.path(), merged.features()),
            (Some("up"), (HIDDEN, IN))
        );
        let [a, b] = lora.adapters();
        let weight = (base.weight()? + (b.matmul(a)? * 2.)?)?;
        assert_close(case, &merged.weight()?, &weight, two_orders(roundings(8)));
    }
    let [base, _] = load(&fp8_file(dir.path(), 1));
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    for config in [
        LoraConfig::new(0),
        LoraConfig::new(4).with_alpha(f64::NAN),
        LoraConfig::new(4).with_dropout(1.),
    ] {
        let error = LoraLinear::new(base.clone(), config, vb.pp("down"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("down") && error.contains("LoraConfig::"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn an_update_refuses_as_many_elements_in_another_shape() -> Outcome {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let update = LoraUpdate::new((HIDDEN, IN), LoraConfig::new(4), vb.pp("up"))?;
    let (x, y) = (tensor(1, &[2, 3, IN]), tensor(2, &[2, 3, HIDDEN]));
    assert_eq!(update.add_to(&y, &x, None)?.dims(), y.dims());
    let error = update.add_to(&y, &x.transpose(1, 2)?, None).unwrap_err();
    assert!(error.to_string().contains("layer `up`"), "{error}");
    let error = update.add_to(&y.transpose(0, 1)?, &x, None).unwrap_err();
    assert!(error.to_string().contains("the layer's result"), "{error}");
    Ok(())
}

#[test]
fn a_merged_layer_rounds_operands_as_its_base_does() -> Outcome {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let base = fp8_recipes::nn::linear(IN, HIDDEN, vb.pp("up"))?;
    let base = base.with_operands(Some(DType::BF16));
    // B begins with zeros: the merged weight is the base's.
    let merged = lora(base.clone(), vb.pp("adapter")).merge()?;
    assert_eq!(merged.operands(), Some(DType::BF16));
    let x = tensor(1, &[5, IN]);
    assert_eq!(flat(&merged.forward(&x)?), flat(&base.forward(&x)?));
    Ok(())
}
