//! Gradients of the differentiable building blocks: values, dtypes, reach and reproducibility.

mod special;

use candle_core::{D, DType, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{
    CrossEntropyOptions, causal_softmax, cross_entropy, cross_entropy_with, gelu, layer_norm,
    rms_norm, rope, rope_i, softmax_last_dim,
};
use fp8_test_support::approx::assert_within;
use fp8_test_support::models::{Model, Norm, Rope};
use fp8_test_support::{device, flat64, on_cuda, rounding, skipped_on_cuda};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// f64 values in (-2, 2) without a pattern.
fn wave(shape: &[usize], seed: usize) -> Tensor {
    let wave = fp8_test_support::wave(shape, seed) * 2.;
    wave.and_then(|x| x.to_device(&device())).unwrap()
}

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

struct Case {
    name: &'static str,
    args: Vec<Tensor>,
    model: Model,
    op: Op,
}

fn case(
    name: &'static str,
    args: Vec<Tensor>,
    model: Model,
    op: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Case {
    Case {
        name,
        args,
        model,
        op: Box::new(op),
    }
}

/// Every op, with `rows` controlling its size.
fn cases(rows: usize) -> Vec<Case> {
    let (d, t) = (7, 5);
    let classes: Vec<usize> = (0..rows * 2).map(|i| i * 5 % d).collect();
    let targets: Vec<u32> = classes.iter().map(|&class| class as u32).collect();
    let targets = Tensor::from_vec(targets, (rows, 2), &device()).unwrap();
    let ignoring = targets.clone();
    let all = classes.iter().map(|&class| Some(class)).collect();
    let not_five = classes.iter().map(|&class| Some(class).filter(|&c| c != 5));
    let norm = |center, eps| Model::Norm(Norm { center, eps });
    let angles = || {
        vec![
            wave(&[rows, 2, t, 6], 1),
            wave(&[t + 1, 3], 2),
            wave(&[t + 1, 3], 3),
        ]
    };
    let rotation = |interleaved| {
        Model::Rope(Rope {
            d: 6,
            t,
            interleaved,
        })
    };
    vec![
        case(
            "layer_norm",
            vec![wave(&[rows, 2, d], 1), wave(&[d], 2), wave(&[d], 3)],
            norm(true, 1e-5),
            |a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-5),
        ),
        case(
            "layer_norm without bias",
            vec![wave(&[rows, d], 1), wave(&[d], 2)],
            norm(true, 1e-5),
            |a| layer_norm(&a[0], &a[1], None, 1e-5),
        ),
        case(
            "rms_norm",
            vec![wave(&[rows, 2, d], 1), wave(&[d], 2)],
            norm(false, 1e-6),
            |a| rms_norm(&a[0], &a[1], 1e-6),
        ),
        case(
            "softmax_last_dim",
            vec![wave(&[rows, d], 1)],
            Model::Softmax(d),
            |a| softmax_last_dim(&a[0]),
        ),
        case(
            "causal_softmax",
            vec![wave(&[rows, t, t], 1)],
            Model::CausalSoftmax([t, t], 0.7),
            |a| causal_softmax(&a[0], 0.7),
        ),
        case(
            "causal_softmax behind a cache",
            vec![wave(&[rows, 2, t], 1)],
            Model::CausalSoftmax([2, t], -1.3),
            |a| causal_softmax(&a[0], -1.3),
        ),
        case("rope", angles(), rotation(false), |a| {
            rope(&a[0], &a[1], &a[2])
        }),
        case("rope_i", angles(), rotation(true), |a| {
            rope_i(&a[0], &a[1], &a[2])
        }),
        case(
            "gelu",
            vec![(wave(&[rows, d], 1) * 2.5).unwrap()],
            Model::Gelu,
            |a| gelu(&a[0]),
        ),
        case(
            "cross_entropy",
            vec![wave(&[rows, 2, d], 1)],
            Model::CrossEntropy(all),
            move |a| cross_entropy(&a[0], &targets),
        ),
        case(
            "cross_entropy ignoring",
            vec![wave(&[rows, 2, d], 1)],
            Model::CrossEntropy(not_five.collect()),
            move |a| {
                let options = CrossEntropyOptions::default().with_ignore_index(5);
                cross_entropy_with(&a[0], &ignoring, options)
            },
        ),
    ]
}

/// A weight for each element of a result, which every dtype represents.
fn weights(shape: &[usize]) -> Result<Tensor> {
    let weights = (wave(shape, 11) * 32.0)?.round()?;
    Ok(weights.affine(1.0 / 32.0, 0.0)?)
}

/// A scalar in which every element of the result has another weight: its gradient.
fn weighted_sum(y: &Tensor) -> Result<Tensor> {
    Ok((y * weights(y.dims())?.to_dtype(y.dtype())?)?.sum_all()?)
}

fn vars(args: &[Tensor], dtype: DType) -> Vec<Var> {
    args.iter()
        .map(|a| Var::from_tensor(&a.to_dtype(dtype).unwrap()).unwrap())
        .collect()
}

fn tensors(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(|v| v.as_tensor().clone()).collect()
}

/// Central differences at two steps, extrapolated (Richardson): what is left of the truncation error is smaller by the square
/// of the step, times a ratio of derivatives.
#[test]
fn gradients_equal_finite_differences() -> Result<()> {
    const STEP: f64 = 1e-3;
    const UNIT: f64 = rounding::UNIT_F64;
    for Case {
        name,
        args,
        model,
        op,
    } in cases(3)
    {
        let vars = vars(&args, DType::F64);
        let y = op(&tensors(&vars))?;
        let grads = weighted_sum(&y)?.backward()?;
        // What rounding can do to the weighted sum.
        let values: Vec<Vec<f64>> = args.iter().map(flat64).collect();
        let y_len = y.elem_count();
        let terms = model
            .forward(&values)
            .into_iter()
            .zip(flat64(&weights(y.dims())?));
        let in_terms = terms.map(|(y, weight)| {
            let additions = UNIT * (y.value * weight).abs() * (1 + y_len) as f64;
            y.bound(DType::F64) * weight.abs() + additions
        });
        let rounding: f64 = in_terms.sum();
        for (which, var) in vars.iter().enumerate() {
            let grad = grads.get(var);
            let grad = grad.unwrap_or_else(|| panic!("{name}: argument {which} has no gradient"));
            for (element, grad) in flat64(grad).into_iter().enumerate() {
                let at = |delta: f64| -> Result<f64> {
                    let mut values = values[which].clone();
                    values[element] += delta;
                    let mut args = args.clone();
                    args[which] = Tensor::from_vec(values, var.shape(), &device())?;
                    Ok(weighted_sum(&op(&args)?)?.to_scalar()?)
                };
                let slope =
                    |step: f64| -> Result<f64> { Ok((at(step)? - at(-step)?) / (2.0 * step)) };
                let (near, far) = (slope(STEP)?, slope(2.0 * STEP)?);
                let numeric = (4.0 * near - far) / 3.0;
                let inexact_step = 2.0 * UNIT * values[which][element].abs() / STEP * numeric.abs();
                let bound = 0.01 * (far - near).abs() + 1.5 * rounding / STEP + inexact_step;
                let error = (grad - numeric).abs();
                assert!(
                    error <= bound,
                    "{name}, argument {which}, element {element}: {grad} but numerically {numeric} within {bound:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_have_their_arguments_dtype_and_value() -> Result<()> {
    for Case {
        name,
        args,
        model,
        op,
    } in cases(40)
    {
        // Values that every dtype represents.
        let args = args
            .iter()
            .map(|a| a.to_dtype(DType::F16)?.to_dtype(DType::BF16));
        let args: Vec<Tensor> = args.collect::<candle_core::Result<_>>()?;
        let values: Vec<Vec<f64>> = args.iter().map(flat64).collect();
        for dtype in DTYPES {
            // Composed there, by 1 + tanh(u), of which nothing is left for negative arguments.
            if on_cuda() && (name, dtype) == ("gelu", DType::F64) {
                continue;
            }
            let vars = vars(&args, dtype);
            let y = op(&tensors(&vars))?;
            let grads = weighted_sum(&y)?.backward()?;
            let expected = model.backward(&values, &flat64(&weights(y.dims())?), dtype);
            for (which, (var, expected)) in vars.iter().zip(&expected).enumerate() {
                let grad = grads.get(var).unwrap();
                assert_eq!(grad.dtype(), dtype, "{name}, argument {which}");
                assert_eq!(grad.dims(), var.dims(), "{name}, argument {which}");
                let case = format!("{name}, argument {which}");
                assert_within(&flat64(grad), expected, dtype, &case);
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
        for Case { name, args, op, .. } in cases(6000) {
            let vars = vars(&args, dtype);
            let run = || -> Result<Vec<Vec<u64>>> {
                let y = op(&tensors(&vars))?;
                let grads = weighted_sum(&y)?.backward()?;
                let bits = |t: &Tensor| flat64(t).into_iter().map(f64::to_bits).collect();
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
    for Case { name, args, op, .. } in cases(3) {
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
                flat64(grad).iter().any(|&g| g != 0.0),
                "{name}, argument {which}"
            );
        }
    }
    Ok(())
}

#[test]
fn constants_receive_no_gradient() -> Result<()> {
    for Case { name, args, op, .. } in cases(3) {
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
