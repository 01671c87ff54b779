//! Every rank, layout and size of the input.

use super::*;
use candle_core::{DType, Module, Result, Tensor, Var};
use fp8::{Recipe, RecipeName, Role, end_step, fp8_autocast};
use fp8_test_support::{Model, assert_same, device, flat64, normal};

#[test]
fn any_rank_of_x() -> Result<()> {
    let (k, n) = (40, 24);
    for name in DYNAMIC {
        for leading in [vec![], vec![6], vec![2, 3], vec![1, 3, 2], vec![2, 1, 1, 3]] {
            let what = format!("{name} {leading:?}");
            let m: usize = leading.iter().product();
            let (x, weight, g) = operands(m, k, n);
            let shaped = |x: &Tensor, last: usize| x.reshape([&leading[..], &[last]].concat());
            let weight = Var::from_tensor(&weight)?;
            let bias = Var::from_tensor(&normal(4, n))?;
            let model = Model::prepared(&weight, Some(&bias));
            let flat_x = Var::from_tensor(&x)?;
            let flat = model.step(&flat_x, &g, config(name))?;
            let x = Var::from_tensor(&shaped(&x, k)?)?;
            let step = model.step(&x, &shaped(&g, n)?, config(name))?;
            assert_same(&format!("{what}: y"), &step.y, &shaped(&flat.y, n)?);
            assert_same(
                &format!("{what}: grad_x"),
                step.grad_x(),
                &shaped(flat.grad_x(), k)?,
            );
            let same = |name: &str, ours, theirs| {
                assert_same(&format!("{what}: {name}"), ours, theirs);
            };
            same("grad_weight", step.grad_weight(), flat.grad_weight());
            same("grad_bias", step.grad_bias(), flat.grad_bias());
        }
    }
    Ok(())
}

#[test]
fn strided_x_and_grad_output() -> Result<()> {
    let (m, k, n) = (12, 20, 8);
    let wide = normal(5, (m + 3, k + 5));
    let views = [
        ("transposed", normal(5, (k, m)).t()?),
        ("narrowed rows", wide.narrow(0, 2, m)?.narrow(1, 0, k)?),
        ("narrowed columns", wide.narrow(0, 0, m)?.narrow(1, 3, k)?),
        ("broadcast", normal(6, (1, k)).broadcast_as((m, k))?),
        ("permuted", normal(5, (3, k, 4)).permute((0, 2, 1))?),
    ];
    for name in [
        RecipeName::Tensorwise,
        RecipeName::Rowwise,
        RecipeName::Delayed,
    ] {
        for (view, x) in &views {
            assert!(!x.is_contiguous(), "{view}");
            let weight = Var::from_tensor(&normal(2, (n, k)))?;
            let g = normal(7, [&x.dims()[..x.rank() - 1], &[n]].concat());
            let run = |x: &Tensor| Model::prepared(&weight, None).step(x, &g, Recipe::from(name));
            let (strided, contiguous) = (run(x)?, run(&x.force_contiguous()?)?);
            for (gemm, ours, expected) in strided.beside(&contiguous) {
                assert_same(&format!("{name} {view}: {gemm}"), ours, expected);
            }
        }
        // A transposed variable, and a transposed result, so that its gradient is a view.
        let (x, weight, g) = operands(m, k, n);
        let weight = Var::from_tensor(&weight)?;
        let base = Var::from_tensor(&x.t()?.contiguous()?)?;
        let strided = Model::prepared(&weight, None);
        let guard = fp8_autocast(Recipe::from(name))?;
        let y = strided.l.forward(&base.t()?)?;
        let grads = (y.t()? * g.t()?.contiguous()?)?.sum_all()?.backward()?;
        guard.close()?;
        end_step()?;
        let x = Var::from_tensor(&x)?;
        let contiguous = Model::prepared(&weight, None).step(&x, &g, Recipe::from(name))?;
        let grad = grads.get(&base).expect("a gradient through the view").t()?;
        assert_same(
            &format!("{name} transposed: grad_x"),
            &grad,
            contiguous.grad_x(),
        );
        let grad = grads.get(&weight).expect("a gradient of the weight");
        assert_same(
            &format!("{name} transposed: grad_weight"),
            grad,
            contiguous.grad_weight(),
        );
    }
    Ok(())
}

#[test]
fn any_size() -> Result<()> {
    const SIZES: [usize; 8] = [1, 2, 3, 7, 16, 17, 33, 130];
    for name in [RecipeName::Tensorwise, RecipeName::Rowwise] {
        for m in SIZES {
            for k in SIZES {
                for n in SIZES {
                    let what = format!("{name} M {m} K {k} N {n}");
                    let (x, weight, g) = operands(m, k, n);
                    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
                    let step = Model::prepared(&weight, None).step(&x, &g, exact_config(name))?;
                    check_against_oracle(&what, &exact_config(name), (&x, &weight, &g), &step)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn no_tokens() -> Result<()> {
    let (k, n) = (24, 40);
    for name in RecipeName::ALL {
        for emulate in [false, true] {
            let recipe = match Recipe::from(name) {
                Recipe::Linear(config) => Recipe::Linear(config.with_emulate(emulate)),
                delayed => delayed,
            };
            for dims in [vec![0], vec![2, 0], vec![0, 3]] {
                let what = format!("{name} emulate={emulate} {dims:?}");
                let x = Var::zeros([&dims[..], &[k]].concat(), DType::F32, &device())?;
                let g = Tensor::zeros([&dims[..], &[n]].concat(), DType::F32, &device())?;
                let weight = Var::from_tensor(&normal(2, (n, k)))?;
                let bias = Var::from_tensor(&normal(4, n))?;
                let model = Model::prepared(&weight, Some(&bias));
                let step = model.step(&x, &g, recipe.clone())?;
                assert_eq!(step.y.dims(), g.dims(), "{what}");
                assert_eq!(step.grad_x().dims(), x.dims(), "{what}");
                for (name, grad, dims) in [
                    ("grad_weight", step.grad_weight(), vec![n, k]),
                    ("grad_bias", step.grad_bias(), vec![n]),
                ] {
                    assert_eq!(grad.dims(), dims, "{what}: {name}");
                    assert!(
                        flat64(grad).iter().all(|&g| g == 0.),
                        "{what}: {name} {grad}"
                    );
                }
                let state = model.l.fp8_state().unwrap();
                let scale = state
                    .slot(Role::Input)
                    .unwrap()
                    .tensors()
                    .unwrap()
                    .quant_scale
                    .to_vec1::<f32>()?;
                assert_eq!(scale, [1.], "{what}: nothing was recorded");
            }
        }
    }
    Ok(())
}
