//! Gradients of the differentiable building blocks: values, dtypes, reach and reproducibility.

use candle_core::{D, DType, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{
    CrossEntropyOptions, causal_softmax, cross_entropy, cross_entropy_with, gelu, layer_norm,
    rms_norm, rope, rope_i, softmax_last_dim,
};
use fp8_test_support::{device, isa, on_cuda, skipped_on_cuda};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// f64 values in (-2, 2) without a pattern.
fn wave(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..n)
        .map(|i| 2.0 * (((i + 7) * (seed * 2 + 9)) as f64 * 12.9898).sin())
        .collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

struct Case {
    name: &'static str,
    args: Vec<Tensor>,
    op: Op,
}

fn case(
    name: &'static str,
    args: Vec<Tensor>,
    op: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Case {
    Case {
        name,
        args,
        op: Box::new(op),
    }
}

/// Every op, with `rows` controlling its size.
fn cases(rows: usize) -> Vec<Case> {
    let (d, t) = (7, 5);
    let vocab: Vec<u32> = (0..rows * 2).map(|i| (i * 5 % d) as u32).collect();
    let targets = Tensor::from_vec(vocab, (rows, 2), &device()).unwrap();
    let ignoring = targets.clone();
    let angles = || {
        vec![
            wave(&[rows, 2, t, 6], 1),
            wave(&[t + 1, 3], 2),
            wave(&[t + 1, 3], 3),
        ]
    };
    vec![
        case(
            "layer_norm",
            vec![wave(&[rows, 2, d], 1), wave(&[d], 2), wave(&[d], 3)],
            |a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-5),
        ),
        case(
            "layer_norm without bias",
            vec![wave(&[rows, d], 1), wave(&[d], 2)],
            |a| layer_norm(&a[0], &a[1], None, 1e-5),
        ),
        case(
            "rms_norm",
            vec![wave(&[rows, 2, d], 1), wave(&[d], 2)],
            |a| rms_norm(&a[0], &a[1], 1e-6),
        ),
        case("softmax_last_dim", vec![wave(&[rows, d], 1)], |a| {
            softmax_last_dim(&a[0])
        }),
        case("causal_softmax", vec![wave(&[rows, t, t], 1)], |a| {
            causal_softmax(&a[0], 0.7)
        }),
        case(
            "causal_softmax behind a cache",
            vec![wave(&[rows, 2, t], 1)],
            |a| causal_softmax(&a[0], -1.3),
        ),
        case("rope", angles(), |a| rope(&a[0], &a[1], &a[2])),
        case("rope_i", angles(), |a| rope_i(&a[0], &a[1], &a[2])),
        case("gelu", vec![(wave(&[rows, d], 1) * 2.5).unwrap()], |a| {
            gelu(&a[0])
        }),
        case("cross_entropy", vec![wave(&[rows, 2, d], 1)], move |a| {
            cross_entropy(&a[0], &targets)
        }),
        case(
            "cross_entropy ignoring",
            vec![wave(&[rows, 2, d], 1)],
            move |a| {
                cross_entropy_with(
                    &a[0],
                    &ignoring,
                    CrossEntropyOptions::default().with_ignore_index(5),
                )
            },
        ),
    ]
}

/// A scalar with a different weight for every element of the result; every dtype represents the weights.
fn weighted_sum(y: &Tensor) -> Result<Tensor> {
    let weights = (wave(y.dims(), 11) * 32.0)?
        .round()?
        .affine(1.0 / 32.0, 0.0)?;
    Ok((y * weights.to_dtype(y.dtype())?)?.sum_all()?)
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

fn vars(args: &[Tensor], dtype: DType) -> Vec<Var> {
    args.iter()
        .map(|a| Var::from_tensor(&a.to_dtype(dtype).unwrap()).unwrap())
        .collect()
}

fn tensors(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(|v| v.as_tensor().clone()).collect()
}

#[test]
fn every_instruction_set_passes() {
    if !on_cuda() {
        isa::run_again_on_each(&[]);
    }
}

#[test]
fn gradients_equal_finite_differences() -> Result<()> {
    const STEP: f64 = 1e-5;
    // Central differences: the truncation error is about STEP^2, the rounding error 1e-16 / STEP.
    const BOUND: f64 = 1e-8;
    for Case { name, args, op } in cases(3) {
        let vars = vars(&args, DType::F64);
        let grads = weighted_sum(&op(&tensors(&vars))?)?.backward()?;
        for (which, var) in vars.iter().enumerate() {
            let grad = flat(
                grads
                    .get(var)
                    .unwrap_or_else(|| panic!("{name}: argument {which} has no gradient")),
            );
            let values = flat(var);
            for element in 0..values.len() {
                let at = |delta: f64| -> Result<f64> {
                    let mut values = values.clone();
                    values[element] += delta;
                    let mut args = args.clone();
                    args[which] = Tensor::from_vec(values, var.shape(), &device())?;
                    Ok(weighted_sum(&op(&args)?)?.to_scalar()?)
                };
                let numeric = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
                let error = (grad[element] - numeric).abs() / numeric.abs().max(1.0);
                assert!(
                    error <= BOUND,
                    "{name}, argument {which}, element {element}: {} but numerically {numeric}",
                    grad[element]
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_have_their_arguments_dtype_and_value() -> Result<()> {
    for Case { name, args, op } in cases(40) {
        let reference: Vec<Tensor> = args
            .iter()
            .map(|a| a.to_dtype(DType::F16)?.to_dtype(DType::BF16))
            .collect::<candle_core::Result<_>>()?;
        let exact = vars(&reference, DType::F64);
        let exact_grads = weighted_sum(&op(&tensors(&exact))?)?.backward()?;
        for dtype in DTYPES {
            // Roundings of the argument's gradient, of the result's, and of the weights of the sum.
            let bound = match dtype {
                DType::F64 => 1e-14,
                DType::F32 => 2e-6,
                DType::F16 => 4e-3,
                _ => 3e-2,
            };
            let vars = vars(&reference, dtype);
            let grads = weighted_sum(&op(&tensors(&vars))?)?.backward()?;
            for (which, (var, exact)) in vars.iter().zip(&exact).enumerate() {
                let grad = grads.get(var).unwrap();
                assert_eq!(grad.dtype(), dtype, "{name}, argument {which}");
                assert_eq!(grad.dims(), var.dims(), "{name}, argument {which}");
                let exact = flat(exact_grads.get(exact).unwrap());
                let largest = exact.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
                for (got, exact) in flat(grad).iter().zip(&exact) {
                    let error = (got - exact).abs() / largest;
                    assert!(
                        error <= bound,
                        "{name}, argument {which}, {dtype:?}: {got}, exact {exact}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() -> Result<()> {
    if skipped_on_cuda("it is about the threads of the CPU") {
        return Ok(());
    }
    // 6000 rows make several blocks in every op.
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for Case { name, args, op } in cases(6000) {
            let vars = vars(&args, dtype);
            let run = || -> Result<Vec<Vec<u64>>> {
                let y = op(&tensors(&vars))?;
                let grads = weighted_sum(&y)?.backward()?;
                let bits = |t: &Tensor| flat(t).into_iter().map(f64::to_bits).collect();
                Ok(std::iter::once(bits(&y))
                    .chain(vars.iter().map(|v| bits(grads.get(v).unwrap())))
                    .collect())
            };
            let on = |threads| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap()
                    .install(run)
            };
            let one = on(1)?;
            for threads in [2, 3] {
                assert!(on(threads)? == one, "{name}, {dtype:?}: {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_reach_every_variable_upstream() -> Result<()> {
    for Case { name, args, op } in cases(3) {
        // Each argument is computed from a variable of its own.
        let vars = vars(&args, DType::F32);
        let args = vars
            .iter()
            .map(|v| v.affine(0.5, 0.1)?.tanh())
            .collect::<candle_core::Result<Vec<_>>>()?;
        let grads = weighted_sum(&op(&args)?)?.backward()?;
        for (which, var) in vars.iter().enumerate() {
            let grad = grads
                .get(var)
                .unwrap_or_else(|| panic!("{name} cuts argument {which} from the graph"));
            assert!(
                flat(grad).iter().any(|&g| g != 0.0),
                "{name}, argument {which}"
            );
        }
    }
    Ok(())
}

#[test]
fn constants_receive_no_gradient() -> Result<()> {
    for Case { name, args, op } in cases(3) {
        for variable in 0..args.len() {
            let var = Var::from_tensor(&args[variable])?;
            let mut args = args.clone();
            args[variable] = var.as_tensor().clone();
            let grads = weighted_sum(&op(&args)?)?.backward()?;
            for (which, arg) in args.iter().enumerate() {
                assert_eq!(
                    grads.get(arg).is_some(),
                    which == variable,
                    "{name}, argument {which}"
                );
            }
        }
        assert!(!op(&args)?.track_op(), "{name}");
    }
    Ok(())
}

#[test]
fn strided_arguments_and_gradients() -> Result<()> {
    for Case { name, args, op } in cases(4) {
        // The same values, stored with the last two dimensions swapped.
        let swap = |t: &Tensor| {
            if t.rank() < 2 {
                Ok(t.clone())
            } else {
                t.transpose(D::Minus1, D::Minus2)
            }
        };
        let plain = vars(&args, DType::F64);
        let strided = args
            .iter()
            .map(|a| Var::from_tensor(&swap(a)?.contiguous()?))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let strided_args = strided
            .iter()
            .map(|v| swap(v))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let (y, y_strided) = (op(&tensors(&plain))?, op(&strided_args)?);
        assert_eq!(flat(&y), flat(&y_strided), "{name}");
        // Transposing the results makes the gradients that come back strided too.
        let grads = weighted_sum(&swap(&y)?.contiguous()?)?.backward()?;
        let strided_grads = weighted_sum(&swap(&y_strided)?.contiguous()?)?.backward()?;
        for (plain, strided) in plain.iter().zip(&strided) {
            let grad = flat(grads.get(plain).unwrap());
            assert_eq!(
                grad,
                flat(&swap(strided_grads.get(strided).unwrap())?),
                "{name}"
            );
        }
    }
    Ok(())
}

#[test]
fn hidden_logits_get_no_gradient_from_nan() -> Result<()> {
    let x = Var::from_tensor(&wave(&[3, 4], 1))?;
    let nan_where_hidden = Tensor::new(
        &[
            [1.0, 2.0, f64::NAN, f64::NAN],
            [3.0, 4.0, 5.0, f64::NAN],
            [6.0, 7.0, 8.0, 9.0],
        ],
        &device(),
    )?;
    let grads = (causal_softmax(&x, 1.0)? * nan_where_hidden)?
        .sum_all()?
        .backward()?;
    let grad = grads.get(&x).unwrap().to_vec2::<f64>()?;
    for (i, row) in grad.iter().enumerate() {
        for (j, &g) in row.iter().enumerate() {
            if j > i + 1 {
                assert_eq!(g, 0.0, "hidden [{i}, {j}]");
            } else {
                assert!(g.is_finite() && g != 0.0, "visible [{i}, {j}]: {g}");
            }
        }
    }
    Ok(())
}

#[test]
fn ignored_positions_get_no_gradient() -> Result<()> {
    let options = CrossEntropyOptions::default().with_ignore_index(-1);
    let logits = Var::from_tensor(&wave(&[3, 4], 1))?;
    let targets = Tensor::new(&[2i64, -1, 0], &device())?;
    let grads = cross_entropy_with(&logits, &targets, options)?.backward()?;
    let ignored = grads.get(&logits).unwrap().to_vec2::<f64>()?;
    assert_eq!(ignored[1], [0.0; 4]);

    // The other rows are as if the ignored one were not there.
    let kept = Var::from_tensor(&Tensor::cat(
        &[logits.narrow(0, 0, 1)?, logits.narrow(0, 2, 1)?],
        0,
    )?)?;
    let grads = cross_entropy(&kept, &Tensor::new(&[2i64, 0], &device())?)?.backward()?;
    let kept = grads.get(&kept).unwrap().to_vec2::<f64>()?;
    assert_eq!([&ignored[0], &ignored[2]], [&kept[0], &kept[1]]);

    let targets = Tensor::new(&[-1i64, -1, -1], &device())?;
    let loss = cross_entropy_with(&logits, &targets, options)?;
    assert!(loss.to_scalar::<f64>()?.is_nan());
    assert_eq!(flat(loss.backward()?.get(&logits).unwrap()), [0.0; 12]);
    Ok(())
}

#[test]
fn empty_tensors_have_empty_gradients() -> Result<()> {
    if skipped_on_cuda("candle itself makes no empty gradients there") {
        return Ok(());
    }
    let weight = Var::from_tensor(&wave(&[7], 1))?;
    let x = Var::zeros((0, 7), DType::F64, &device())?;
    let y = layer_norm(&x, &weight, Some(&weight), 1e-5)?.add(&rms_norm(
        &gelu(&softmax_last_dim(&x)?)?,
        &weight,
        1e-5,
    )?)?;
    let grads = y.sum_all()?.backward()?;
    assert_eq!(grads.get(&x).unwrap().dims(), [0, 7]);
    assert_eq!(flat(grads.get(&weight).unwrap()), [0.0; 7]);
    Ok(())
}
