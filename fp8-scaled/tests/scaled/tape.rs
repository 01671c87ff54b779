//! The graph: where gradients flow, how they are added, and under which settings they are computed.

use crate::gradient_check::{values, wave};
use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::{
    Direction, Norm, Pow2Rounding, ScaleCheck, Scaled, ScaledDType, ScaledGrads, ScaledOptions,
    ScaledVar, scaled_scope,
};

fn var(x: &[f32]) -> Result<ScaledVar> {
    ScaledVar::new("x", &Tensor::new(x, &Device::Cpu)?)
}

fn fixed(x: &[f32], scale: f32) -> Result<Scaled> {
    Scaled::from_parts(&Tensor::new(x, &Device::Cpu)?, scale)
}

fn grad(grads: &ScaledGrads, var: &ScaledVar) -> Scaled {
    grads.get(var).expect("a gradient").clone()
}

/// The bits of the data in f64, an exact conversion that keeps different numbers different.
fn bits(x: &Scaled) -> Result<Vec<u64>> {
    let data = x.data()?.to_dtype(DType::F64)?.flatten_all()?;
    Ok(data
        .to_vec1::<f64>()?
        .into_iter()
        .map(f64::to_bits)
        .collect())
}

#[test]
fn cotangents_meet_by_the_rule_of_addition() -> Result<()> {
    let x = var(&[1.0, 2.0])?;
    let sum = |x: &ScaledVar| -> Result<Scaled> {
        let (a, b) = (fixed(&[1.0, 1.5], 8.0)?, fixed(&[3.0, 1.0], 2.0)?);
        x.value().mul(&a)?.add(&x.value().mul(&b)?)
    };
    let one = fixed(&[1.0, 1.0], 1.0)?;
    let found = grad(&sum(&x)?.backward_with(&one)?, &x);
    // 8 * [1, 1.5] + 2 * [3, 1] at the larger scale.
    assert_eq!(found.scale().to_f32(), 8.0);
    assert_eq!(found.data()?.to_vec1::<f32>()?, [1.75, 1.75]);

    // Under the settings that were in force when the operation ran.
    let scope = scaled_scope(ScaledOptions::default().with_scale_rounding(Pow2Rounding::Up));
    let under_up = sum(&x)?;
    drop(scope);
    let found = grad(&under_up.backward_with(&one)?, &x);
    assert_eq!(found.scale().to_f32(), 16.0);
    assert_eq!(found.to_vec1()?, [14.0, 14.0]);
    Ok(())
}

/// 100,000 operations, on a stack too small for a recursion of that depth.
#[test]
fn a_long_chain() {
    let chain = || -> Result<()> {
        let x = var(&[1.5])?;
        let long = |x: &ScaledVar| -> Result<Scaled> {
            let mut y = x.value();
            for _ in 0..100_000 {
                y = y.neg()?;
            }
            Ok(y)
        };
        assert_eq!(grad(&long(&x)?.backward()?, &x).to_vec1()?, [1.0]);
        let kept = long(&x)?;
        kept.backward_retained()?;
        drop(kept);
        drop(long(&x)?);
        Ok(())
    };
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    thread
        .spawn(move || chain().unwrap())
        .unwrap()
        .join()
        .unwrap();
}

#[test]
fn gradients_flow_to_variables_alone() -> Result<()> {
    let (x, y) = (var(&[1.0, 2.0])?, var(&[3.0, 4.0])?);
    let constant = fixed(&[5.0, 6.0], 1.0)?;
    assert!(!constant.is_tracked() && !constant.square()?.is_tracked());
    assert!(x.value().mul(&constant)?.is_tracked());
    let loss = x
        .value()
        .mul(&constant)?
        .mul(&y.value().detach())?
        .sum_all()?;
    let grads = loss.backward()?;
    assert_eq!(grads.len(), 1);
    assert!(grads.get(&y).is_none());
    assert_eq!(grad(&grads, &x).to_vec1()?, [15.0, 24.0]);
    assert!(!grad(&grads, &x).is_tracked());
    assert!(constant.sum_all()?.backward()?.is_empty());
    Ok(())
}

#[test]
fn a_retained_graph_gives_the_same_again() -> Result<()> {
    let x = ScaledVar::rescaled("x", &wave(&[4, 8], 1), DType::F16)?;
    let y = x.value().tanh()?.mul(&x.value().exp()?)?;
    let loss = y.sum_keepdim(&[1])?.square()?.mean_all()?;
    let of = |grads: ScaledGrads| -> Result<_> {
        let grad = grad(&grads, &x);
        Ok((grad.scale(), bits(&grad)?))
    };
    let first = of(loss.backward_retained()?)?;
    assert_eq!(of(loss.backward_retained()?)?, first);
    assert_eq!(of(loss.backward()?)?, first);
    Ok(())
}

#[test]
fn a_forward_cast_acts_while_differentiating() -> Result<()> {
    let cast = [1.125, 2.25, 16.0, 288.0];
    let (x, w) = (var(&[1.1, 2.3, 17.0, 300.0])?, var(&[3.0, 5.0, 7.0, 9.0])?);
    let y = x.value().cast_on_forward(Format::E4M3)?;
    assert_eq!(y.dtype(), ScaledDType::Fp8(Format::E4M3));
    assert_eq!(y.to_vec1()?, cast);
    let product = y.mul(&w.value())?;
    assert_eq!(product.to_vec1()?, [3.375, 11.25, 112.0, 2592.0]);
    let grads = product.sum_all()?.backward()?;
    // The factor that was multiplied; the cotangent of x is not cast.
    assert_eq!(grad(&grads, &w).to_vec1()?, cast);
    assert_eq!(grad(&grads, &x).to_vec1()?, [3.0, 5.0, 7.0, 9.0]);
    assert_eq!(grad(&grads, &x).dtype(), ScaledDType::Float(DType::F32));
    Ok(())
}

#[test]
fn a_backward_cast_acts_on_cotangents() -> Result<()> {
    let numbers = [1.1, 2.3, 17.0, 300.0];
    let x = var(&numbers)?;
    let y = x.value().cast_on_backward(Format::E5M2)?;
    assert_eq!(y.to_vec1()?, numbers);
    let grads = y.mul(&fixed(&numbers, 1.0)?)?.sum_all()?.backward()?;
    let found = grad(&grads, &x);
    assert_eq!(found.dtype(), ScaledDType::Fp8(Format::E5M2));
    assert_eq!(found.to_vec1()?, [1.0, 2.5, 16.0, 320.0]);
    Ok(())
}

#[test]
fn rescaling_acts_in_its_direction() -> Result<()> {
    let (x, w) = (var(&[300.0, 400.0])?, fixed(&[1000.0, -3000.0], 1.0)?);
    for (direction, value_scale, grad_scale) in [
        (Direction::Forward, 256.0, 1.0),
        (Direction::Backward, 1.0, 2048.0),
    ] {
        let y = x.value().rescale(Norm::Max, direction)?;
        assert_eq!(y.scale().to_f32(), value_scale, "{direction:?}");
        assert_eq!(y.to_vec1()?, [300.0, 400.0]);
        let found = grad(&y.mul(&w)?.backward_with(&fixed(&[1.0, 1.0], 1.0)?)?, &x);
        assert_eq!(found.scale().to_f32(), grad_scale, "{direction:?}");
        assert_eq!(found.to_vec1()?, [1000.0, -3000.0]);
    }
    Ok(())
}

#[test]
fn scopes_nest() -> Result<()> {
    let (a, b) = (fixed(&[1.0], 2.0)?, fixed(&[1.0], 8.0)?);
    let scale = || Ok::<f32, fp8_scaled::Error>(a.add(&b)?.scale().to_f32());
    let rounding = |rounding| ScaledOptions::default().with_scale_rounding(rounding);
    {
        let _up = scaled_scope(rounding(Pow2Rounding::Up));
        assert_eq!(scale()?, 16.0);
        {
            let _none = scaled_scope(rounding(Pow2Rounding::None));
            assert!((scale()? - 68f32.sqrt()).abs() < 1e-5);
        }
        assert_eq!(scale()?, 16.0);
        let unwound = std::panic::catch_unwind(|| {
            let _down = scaled_scope(ScaledOptions::default());
            panic!("to see that the scope is left");
        });
        let panic = unwound.unwrap_err();
        let said = panic.downcast_ref::<&str>();
        assert_eq!(said, Some(&"to see that the scope is left"));
        assert_eq!(scale()?, 16.0);
        // Scopes belong to one thread.
        let (a, b) = (a.clone(), b.clone());
        let other = std::thread::spawn(move || a.add(&b).map(|sum| sum.scale().to_f32()));
        assert_eq!(other.join().unwrap()?, 8.0);
    }
    assert_eq!(scale()?, 8.0);
    Ok(())
}

#[test]
fn stochastic_scales_depend_on_the_seed() -> Result<()> {
    let x = fixed(&[1.0; 10], 1.0)?;
    let draw = |seed| -> Result<Vec<f32>> {
        let options = ScaledOptions::default()
            .with_scale_rounding(Pow2Rounding::Stochastic)
            .with_seed(seed);
        let _scope = scaled_scope(options);
        (0..64)
            .map(|_| Ok(x.sum_keepdim(&[0])?.scale().to_f32()))
            .collect()
    };
    // Each scope begins with the first number of its seed, whatever other scopes have drawn.
    let first = draw(1)?;
    assert!(first.contains(&2.0) && first.contains(&4.0));
    assert_eq!(draw(1)?, first);
    let second = draw(2)?;
    assert_ne!(second, first);
    assert_eq!((draw(1)?, draw(2)?), (first, second));
    Ok(())
}

/// A tensor of zero scale has the value 0 whatever its data are, and so do results computed from it.
#[test]
fn zero_scales() -> Result<()> {
    let zero = {
        let _lenient = scaled_scope(ScaledOptions::default().with_check(ScaleCheck::Lenient));
        fixed(&[f32::INFINITY, f32::NAN, 1.0], 0.0)?
    };
    let zero = ScaledVar::from_scaled("zero", &zero)?;
    let x = ScaledVar::from_scaled("x", &fixed(&[1.0, 2.0, 3.0], 4.0)?)?;
    let (z, v) = (zero.value(), x.value());
    let mask = Tensor::new(&[1u8, 0, 1], &Device::Cpu)?;
    let six = [4.0, 8.0, 12.0];
    for (name, y, expected) in [
        ("add", z.add(&v)?, six),
        ("add", v.add(&z)?, six),
        ("sub", v.sub(&z)?, six),
        ("mul", v.mul(&z)?, [0.0; 3]),
        ("div", z.div(&v)?, [0.0; 3]),
        ("maximum", z.maximum(&v)?, six),
        ("minimum", v.minimum(&z)?, [0.0; 3]),
        ("where", Scaled::where_cond(&mask, &z, &v)?, [0.0, 8.0, 0.0]),
        ("neg", z.neg()?, [0.0; 3]),
        ("abs", z.abs()?, [0.0; 3]),
        ("relu", z.relu()?, [0.0; 3]),
        ("sign", z.sign()?, [0.0; 3]),
        ("square", z.square()?, [0.0; 3]),
        ("powi", z.powi(3)?, [0.0; 3]),
        ("powi 0", z.powi(0)?, [1.0; 3]),
        ("exp", z.exp()?, [1.0; 3]),
        ("cos", z.cos()?, [1.0; 3]),
        ("sigmoid", z.sigmoid()?, [0.5; 3]),
        ("sqrt", z.sqrt()?.detach(), [0.0; 3]),
        ("mul_constant", z.mul_constant(3.0)?, [0.0; 3]),
        ("add_constant", z.add_constant(3.0)?, [3.0; 3]),
        ("mul_constant 0", v.mul_constant(0.0)?, [0.0; 3]),
        ("set_scaling", z.set_scaling(2.0)?, [0.0; 3]),
        ("dynamic_rescale", z.dynamic_rescale_l2()?, [0.0; 3]),
        (
            "cat",
            Scaled::cat(&[&z, &v], 0)?.narrow(0, 2, 3)?,
            [0.0, 4.0, 8.0],
        ),
        ("sum", z.sum_keepdim(&[0])?.broadcast_as(&[3])?, [0.0; 3]),
        ("mean", z.mean_keepdim(&[0])?.broadcast_as(&[3])?, [0.0; 3]),
        ("max", z.max_keepdim(0)?.broadcast_as(&[3])?, [0.0; 3]),
        ("prod", z.prod_keepdim(&[0])?.broadcast_as(&[3])?, [0.0; 3]),
    ] {
        let y = y.add(&Scaled::zeros(3, DType::F32, &Device::Cpu)?)?;
        assert_eq!(values(&y)?, expected.map(f64::from), "{name}");
        let grads = y.sum_all()?.backward()?;
        for var in [&zero, &x] {
            let finite = grads.get(var).map(|g| g.to_vec1()).transpose()?;
            let finite = finite.is_none_or(|g| g.iter().all(|g| g.is_finite()));
            assert!(finite, "{name}: {grads:?}");
        }
    }
    assert_eq!(z.is_finite()?.to_vec1::<u8>()?, [1; 3]);
    assert_eq!(z.lt(&v)?.to_vec1::<u8>()?, [1; 3]);
    assert_eq!(z.argmax(0)?.to_scalar::<u32>()?, 0);
    Ok(())
}

/// At any magnitude, and more micro-batches than f16 data at one scale could sum.
#[test]
fn gradients_of_micro_batches_add_up() -> Result<()> {
    let x = ScaledVar::rescaled("x", &Tensor::new(&[1f32, 2.0], &Device::Cpu)?, DType::F16)?;
    let of = |factor: f64, scale: f32| -> Result<ScaledGrads> {
        let data = (Tensor::ones(2, DType::F32, &Device::Cpu)? * 16384.0)?.to_dtype(DType::F16)?;
        let weights = Scaled::from_parts(&data, scale)?;
        x.value()
            .mul(&weights)?
            .sum_all()?
            .mul_constant(factor)?
            .backward()
    };
    for scale in [-40, 0, 20].map(|exponent| 2f32.powi(exponent)) {
        let mut sum = ScaledGrads::default();
        for _ in 0..16 {
            sum = sum.add(of(1.0, scale)?)?;
        }
        let mean = sum.mul_constant(1.0 / 16.0)?;
        let expected = 16384.0 * scale;
        assert_eq!(grad(&mean, &x).to_vec1()?, [expected; 2]);
        // The data stay near 1 and depend only on ratios.
        assert_eq!(
            grad(&mean, &x)
                .data()?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?,
            [1.0; 2]
        );
    }
    // A variable with a gradient in only one of them keeps it.
    let y = var(&[3.0])?;
    let sum = of(1.0, 1.0)?.add(y.value().square()?.sum_all()?.backward()?)?;
    assert_eq!((sum.len(), grad(&sum, &y).to_vec1()?), (2, vec![6.0]));
    let mut other = ScaledGrads::default();
    other.insert(&y, fixed(&[1.0, 2.0], 1.0)?);
    assert!(matches!(
        sum.add(other),
        Err(fp8_scaled::Error::Fp8(fp8_candle::Error::Shape { .. }))
    ));
    Ok(())
}
