//! Gradients that meet: those of a pass within a pass, and those of a tensor that is its own only part.

use candle_core::{Device, Tensor, Var};
use fp8_candle::ops::{Activation, gelu};
use fp8_candle::wide::{backward, recompute};
use fp8_candle::{Result, WideNode};

fn gradient(loss: &Tensor, var: &Var) -> Result<[Vec<f32>; 2]> {
    let grads = [backward(loss)?, loss.backward()?];
    Ok(grads.map(|grads| grads.get(var).unwrap().to_vec1().unwrap()))
}

/// A function that is recomputed reads a result from outside, whose gradient comes from the other reader before or after it.
#[test]
fn a_pass_within_a_pass_leaves_the_gradients_of_the_outer_one() -> Result<()> {
    let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
    let loss = |recomputed: bool, first: bool| -> Result<Tensor> {
        let c = gelu(&x)?;
        let h = gelu(&c)?;
        let k = c.clone();
        let f = move |args: &[Tensor]| Ok((&args[0] * &k)?);
        let y = match recomputed {
            true => recompute("f", &[&h], f.clone(), f)?,
            false => f(&[h])?,
        };
        let z = gelu(&c)?;
        let sum = match first {
            true => (y + z)?,
            false => (z + y)?,
        };
        Ok(sum.sum_all()?)
    };
    let [expected, _] = gradient(&loss(false, true)?, &x)?;
    for first in [true, false] {
        let loss = loss(true, first)?;
        // Each pass leaves nothing to the next.
        for got in [gradient(&loss, &x)?, gradient(&loss, &x)?].concat() {
            for (got, expected) in got.iter().zip(&expected) {
                assert!(
                    (got / expected - 1.).abs() < 1e-6,
                    "{first}: {got} {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn one_part_of_a_split_shares_no_gradient() -> Result<()> {
    let (a, b) = (
        Var::new(&[[1f32, -2., 3.]], &Device::Cpu)?,
        Var::new(&[[0f32; 3]], &Device::Cpu)?,
    );
    let mut node = WideNode::new("split");
    let (wide_a, wide_b) = (node.argument(&a), node.argument(&b));
    let u = node.activation(&wide_a, Activation::Gelu)?;
    let parts = node.split(&wide_a, &[3])?;
    let t = node.add(&parts[0], &wide_b)?;
    let v = node.add(&t, &u)?;
    let grads = backward(&node.finish(v)?.sum_all()?)?;
    let of = |var: &Var| grads.get(var).unwrap().flatten_all().unwrap();
    let expected = backward(&(a.as_tensor() + gelu(&a)?)?.sum_all()?)?;
    let expected = expected.get(&a).unwrap().flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(of(&b).to_vec1::<f32>()?, [1.; 3]);
    for (got, expected) in of(&a).to_vec1::<f32>()?.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    }
    Ok(())
}
