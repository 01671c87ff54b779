//! Values of parameters that have changed since: an error, never the new data at the old scale.

use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_scaled::{
    Error, MatmulPrecision, Result, Scaled, ScaledOptions, ScaledVar, as_scaled, scaled_scope,
};

fn var() -> Result<ScaledVar> {
    let x = Tensor::new(&[[1f32, 2.0], [3.0, -4.0]], &Device::Cpu)?;
    ScaledVar::from_scaled("fc.weight", &Scaled::from_parts(&x, 1.0)?)
}

/// Other data at another scale.
fn change(var: &ScaledVar) -> Result<()> {
    let x = Tensor::new(&[[5f32, 6.0], [7.0, 8.0]], &Device::Cpu)?;
    var.set(&Scaled::from_parts(&x, 8.0)?)
}

#[track_caller]
fn refused<T>(result: Result<T>, by: &str) {
    match result {
        Err(Error::ChangedParameter { op, name }) => {
            assert_eq!((op, name.as_str()), (by, "fc.weight"));
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{by} has read changed data"),
    }
}

#[test]
fn a_backward_pass_after_a_change_is_an_error() -> Result<()> {
    let x = as_scaled(&Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?, None)?;
    for precision in [None, Some(MatmulPrecision::FP8)] {
        let scope = precision.map(|matmul| {
            let options = ScaledOptions::default().with_matmul(matmul);
            scaled_scope(options)
        });
        let w = var()?;
        let input = ScaledVar::from_scaled("x", &x)?;
        let forward = || -> Result<Scaled> { input.value().matmul(&w.value())?.sum_all() };
        let kept = forward()?;
        kept.backward_retained()?;
        change(&w)?;
        refused(kept.backward_retained(), "matmul");
        // A new forward pass has the new values.
        let grads = forward()?.backward()?;
        let grad = grads.get(&input).unwrap().to_tensor(DType::F32)?;
        let exact = precision.is_none();
        assert!(!exact || grad.to_vec2::<f32>()? == [[88.0, 120.0]]);
        drop(scope);
    }
    Ok(())
}

#[test]
fn a_kept_value_and_its_views_are_not_read_after_a_change() -> Result<()> {
    let w = var()?;
    let other = var()?;
    let value = w.value();
    let zeros = Scaled::zeros((2, 2), DType::F32, &Device::Cpu)?;
    // All of these share the memory of the parameter.
    let views = [
        value.clone(),
        value.detach(),
        value.transpose(0, 1)?,
        value.narrow(0, 1, 1)?,
        value.detach().reshape(&[4])?,
        value.mul_constant(2.0)?,
        value.set_scaling(1.0)?,
        value.add(&zeros)?,
        Scaled::cat(&[&value], 0)?,
    ];
    // These do not.
    let copies = [
        value.neg()?,
        value.add(&other.value())?,
        value.astype(Format::E4M3)?,
        value.astype(DType::F16)?,
    ];
    let tensor = value.to_tensor(DType::F32)?;
    let before = copies.each_ref().map(|copy| copy.to_tensor(DType::F32));
    change(&w)?;
    for view in &views {
        refused(view.data(), "Scaled::data");
        refused(view.to_tensor(DType::F32), "Scaled::data");
        refused(view.reshape(&[view.elem_count(), 1]), "Scaled::data");
        refused(view.neg(), "Scaled::data");
        refused(view.astype(Format::E5M2), "Scaled::data");
    }
    for (copy, before) in copies.iter().zip(before) {
        let now = copy.to_tensor(DType::F32)?;
        assert_eq!(now.to_vec2::<f32>()?, before?.to_vec2::<f32>()?);
    }
    assert_eq!(tensor.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, -4.0]]);
    let new = w.value().to_tensor(DType::F32)?;
    assert_eq!(new.to_vec2::<f32>()?, [[40.0, 48.0], [56.0, 64.0]]);
    Ok(())
}
