//! Random axes against the loops of `reference.rs`: outside a guard, and inside one against the values of the casts.

use crate::reference::{Case, CastOf, Operands, Scales, Sum, bias_gradient, cast, products};
use candle_core::{Module, Result, Tensor, Var};
use fp8_core::Format;
use fp8_recipes::nn::DenseGeneral;
use fp8_recipes::{PrepareOptions, Recipe, prepare_fp8, with_fp8};
use fp8_test_support::{flat64, tensor, var};

const CASES: u64 = 50;

/// A layer with its variables.
struct Built {
    kernel: Var,
    bias: Option<Var>,
    layer: DenseGeneral,
}

fn build(case: &Case, seed: u64) -> Built {
    let kernel = var(seed, &case.kernel_dims());
    let bias = case.bias.then(|| var(seed + 1, &case.bias_dims()));
    let tensors = (
        kernel.as_tensor().clone(),
        bias.as_ref().map(|bias| bias.as_tensor().clone()),
    );
    let layer = DenseGeneral::new(tensors.0, tensors.1, case.config());
    Built {
        layer: layer.expect("a valid case").with_path("fc"),
        kernel,
        bias,
    }
}

#[track_caller]
fn check(what: &str, case: &Case, got: &Tensor, expected: &[Sum]) {
    let got = flat64(got);
    assert_eq!(got.len(), expected.len(), "{what} of {case:?}");
    for (at, (got, sum)) in got.iter().zip(expected).enumerate() {
        let error = (got - sum.value).abs();
        assert!(
            error <= sum.bound(),
            "{what} of {case:?}, element {at}: {got}, expected {} within {:e}",
            sum.value,
            sum.bound()
        );
    }
}

/// One forward and backward pass; `recipe` None stays outside a guard.
fn compare(
    case: &Case,
    seed: u64,
    recipe: Option<&Recipe>,
    casts: impl Fn([Vec<f64>; 3]) -> Operands,
) -> Result<()> {
    let Built {
        kernel,
        bias,
        layer,
    } = build(case, seed);
    let x = var(seed + 2, &case.shape);
    let y = match recipe {
        None => layer.forward(&x)?,
        Some(recipe) => {
            let report = prepare_fp8(&layer, &PrepareOptions::default())?;
            assert_eq!(report.converted(), 1, "{report}");
            with_fp8(recipe.clone(), || layer.forward(&x))?
        }
    };
    assert_eq!(y.dims(), case.result_dims(), "{case:?}");
    let cotangent = tensor(seed + 3, &case.result_dims());
    let grads = fp8_recipes::backward(&(y.clone() * &cotangent)?.sum_all()?)?;

    let places = case.places();
    let mut ordered = vec![0f64; places.len()];
    for (value, &place) in flat64(&x).iter().zip(&places) {
        ordered[place] = *value;
    }
    let (counts, gradient) = (case.counts(), flat64(&cotangent));
    let bias_values = bias.as_ref().map(|bias| flat64(bias));
    let operands = casts([ordered, flat64(&kernel), gradient.clone()]);
    let [sums, grad_x, grad_kernel] = products(counts, &operands, bias_values.as_deref());
    let grad_x: Vec<Sum> = places.iter().map(|&place| grad_x[place]).collect();
    check("result", case, &y, &sums);
    let of = |var: &Var| grads.get(var).expect("a gradient").clone();
    assert_eq!(of(&x).dims(), x.dims());
    check("gradient of x", case, &of(&x), &grad_x);
    assert_eq!(of(&kernel).dims(), kernel.dims());
    check("gradient of the kernel", case, &of(&kernel), &grad_kernel);
    if let Some(bias) = &bias {
        assert_eq!(of(bias).dims(), bias.dims());
        check(
            "gradient of the bias",
            case,
            &of(bias),
            &bias_gradient(counts, &gradient),
        );
    }
    Ok(())
}

/// Each operand of the three products by its own cast.
fn cast_all(
    case: &Case,
    [x, kernel, gradient]: &[Vec<f64>; 3],
    [output, grad_input, grad_kernel]: [[CastOf; 2]; 3],
) -> Operands {
    let [b, m, k, n] = case.counts();
    let x = |of| cast(x, [b, m, k], of);
    let kernel = |of| cast(kernel, [b, k, n], of);
    let gradient = |of| cast(gradient, [b, m, n], of);
    Operands {
        output: [x(output[0]), kernel(output[1])],
        grad_input: [gradient(grad_input[0]), kernel(grad_input[1])],
        grad_kernel: [gradient(grad_kernel[0]), x(grad_kernel[1])],
    }
}

#[test]
fn high_precision() -> Result<()> {
    let mut batched = 0;
    for seed in 0..CASES {
        let case = Case::random(seed);
        batched += usize::from(!case.batch_axis.is_empty());
        compare(&case, 10 * seed, None, |[x, kernel, gradient]| Operands {
            output: [x.clone(), kernel.clone()],
            grad_input: [gradient.clone(), kernel],
            grad_kernel: [gradient, x],
        })?;
    }
    // The cases are not all of one kind.
    assert!((10..40).contains(&batched), "{batched}");
    Ok(())
}

/// One scale for a tensor, also over batch entries.
#[test]
fn tensorwise() -> Result<()> {
    let recipe: Recipe = "tensorwise".parse().expect("a name");
    let forward = (Format::E4M3, Scales::Whole, false);
    let backward = (Format::E5M2, Scales::Whole, false);
    for seed in 0..CASES {
        let case = Case::random(seed);
        compare(&case, 10 * seed, Some(&recipe), |values| {
            let casts = [[forward, forward], [backward, forward], [backward, forward]];
            cast_all(&case, &values, casts)
        })?;
    }
    Ok(())
}

/// A scale for each row or column that a product keeps; batch entries share none.
#[test]
fn rowwise() -> Result<()> {
    let recipe: Recipe = "rowwise".parse().expect("a name");
    let rows = (Format::E4M3, Scales::Rows, true);
    let cols = (Format::E4M3, Scales::Cols, true);
    for seed in 0..CASES {
        let case = Case::random(seed);
        compare(&case, 10 * seed, Some(&recipe), |values| {
            cast_all(&case, &values, [[rows, cols], [rows, rows], [cols, cols]])
        })?;
    }
    Ok(())
}
