//! Layers whose products in high precision round their operands to bf16.

use super::*;
use candle_core::Module;
use fp8::fp8_candle::ops::{LinearOptions, linear_with};
use fp8::nn::Linear;
use fp8::{PrepareOptions, RecipeName, fp8_autocast, prepare_fp8};
use fp8_test_support::bits;

/// The result, and the gradients of x, weight and bias, of a layer or of a function.
fn step(
    vars: &[Var; 3],
    g: &Tensor,
    forward: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Vec<Vec<u32>>> {
    let [x, weight, bias] = vars;
    let y = forward(x, weight, bias)?;
    let grads = (&y * g)?.sum_all()?.backward()?;
    let mut all = vec![bits(&y)];
    all.extend(vars.iter().map(|var| bits(grads.get(var).unwrap())));
    Ok(all)
}

fn layer(weight: &Tensor, bias: &Tensor) -> Linear {
    Linear::new(weight.clone(), Some(bias.clone())).with_path("fc")
}

#[test]
fn outside_a_guard_they_compute_as_the_operation_does() -> Result<()> {
    let (x, weight, g) = operands(24, 64, 40);
    let vars = [x, weight, normal(4, 40)].map(|x| Var::from_tensor(&x).unwrap());
    let options = LinearOptions::default().with_operands(DType::BF16);
    let expected = step(&vars, &g, |x, weight, bias| {
        Ok(linear_with(x, weight, Some(bias), options)?)
    })?;
    let rounded = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
        let fc = layer(weight, bias).with_operands(Some(DType::BF16));
        fc.forward(x)
    };
    assert_eq!(step(&vars, &g, rounded)?, expected);
    let plain = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
        let fc = layer(weight, bias).with_operands(Some(DType::BF16));
        fc.with_operands(None).forward(x)
    };
    assert_ne!(step(&vars, &g, plain)?[0], expected[0]);
    Ok(())
}

/// A recipe decides alone what it casts.
#[test]
fn under_a_recipe_nothing_else_is_rounded() -> Result<()> {
    let (x, weight, _) = operands(24, 64, 40);
    let (weight, bias) = (
        Var::from_tensor(&weight)?,
        Var::from_tensor(&normal(4, 40))?,
    );
    let cast = |operands: Option<DType>| -> Result<Vec<u32>> {
        let fc = layer(&weight, &bias).with_operands(operands);
        prepare_fp8(&fc, &PrepareOptions::default())?;
        let guard = fp8_autocast(RecipeName::Rowwise)?;
        let y = fc.forward(&x)?;
        guard.close()?;
        Ok(bits(&y))
    };
    assert_eq!(cast(Some(DType::BF16))?, cast(None)?);
    Ok(())
}

#[test]
fn other_dtypes_are_refused() -> Result<()> {
    let (x, weight, _) = operands(2, 8, 4);
    let fc = layer(&weight, &normal(4, 4)).with_operands(Some(DType::F16));
    let error = fc.forward(&x).unwrap_err().to_string();
    assert!(error.contains("bf16"), "{error}");
    Ok(())
}
