//! A layer without batch axes is a linear layer, and one with batch axes is several.

use candle_core::{DType, Module, Result, Tensor, Var};
use fp8_recipes::config::{DelayedScaling, InitialScale};
use fp8_recipes::nn::{DenseConfig, DenseGeneral, Linear};
use fp8_recipes::{Fp8Module, PrepareOptions, Recipe, RecipeName, Role, prepare_fp8, with_fp8};
use fp8_test_support::{assert_same, tensor, var};

fn prepared(model: &impl Fp8Module) -> Result<()> {
    let report = prepare_fp8(model, &PrepareOptions::default())?;
    assert_eq!(report.converted(), report.layers.len(), "{report}");
    Ok(())
}

fn recipes() -> Vec<Recipe> {
    let mut all: Vec<Recipe> = RecipeName::ALL.map(Recipe::from).into();
    let first = DelayedScaling::default().with_initial(InitialScale::FirstBatch);
    all.push(first.into());
    all
}

/// Results and gradients of two steps.
fn steps(
    layer: &dyn Module,
    recipe: &Recipe,
    [x, kernel, bias]: [&Var; 3],
    gradient: &Tensor,
) -> Result<Vec<Tensor>> {
    let mut all = vec![];
    for _ in 0..2 {
        let y = with_fp8(recipe.clone(), || layer.forward(x))?;
        let grads = fp8_recipes::backward(&(&y * gradient)?.sum_all()?)?;
        all.push(y);
        for var in [x, kernel, bias] {
            all.push(grads.get(var).expect("a gradient").clone());
        }
        let update = (kernel.as_tensor() * 0.9)?;
        kernel.set(&update.detach())?;
    }
    Ok(all)
}

/// Under every recipe, to the bit: also with 16-bit inputs.
#[test]
fn no_batch_axes_are_a_linear_layer() -> Result<()> {
    let (k, features) = ([3, 32], [4, 8]);
    for dtype in [DType::F32, DType::BF16] {
        for recipe in recipes() {
            let x = Var::from_tensor(&tensor(1, &[5, 3, 32]).to_dtype(dtype)?)?;
            let (matrix, bias) = (var(2, &[96, 32]), var(3, &[32]));
            let weight = Var::from_tensor(&matrix.t()?.contiguous()?)?;
            let linear = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
            let linear = linear.with_path("fc");
            prepared(&linear)?;
            let flat = Var::from_tensor(&x.reshape((5, 96))?)?;
            let gradient = tensor(4, &[5, 32]).to_dtype(dtype)?;
            let expected = steps(&linear, &recipe, [&flat, &weight, &bias], &gradient)?;

            let kernel = Var::from_tensor(&matrix.reshape((3, 32, 4, 8))?)?;
            let own_bias = Var::from_tensor(&bias.reshape((4, 8))?)?;
            let config = DenseConfig::new(features).with_axis([-1, -2]);
            let held = Some(own_bias.as_tensor().clone());
            let dense = DenseGeneral::new(kernel.as_tensor().clone(), held, config)?;
            assert_eq!(dense.contracted_sizes(), k);
            let dense = dense.with_path("fc");
            prepared(&dense)?;
            let gradient = gradient.reshape((5, 4, 8))?;
            let got = steps(&dense, &recipe, [&x, &kernel, &own_bias], &gradient)?;
            for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let got = match at % 4 {
                    2 => got.reshape((96, 32))?.t()?.contiguous()?,
                    _ => got.reshape(expected.dims())?,
                };
                assert_same(&format!("{recipe}, {dtype:?}: tensor {at}"), &got, expected);
            }
            let states = (dense.fp8_state(), linear.fp8_state());
            let (Some(dense), Some(linear)) = states else {
                panic!("no state")
            };
            assert_eq!(
                dense.quantized_tensors(),
                linear.quantized_tensors(),
                "{recipe}"
            );
        }
    }
    Ok(())
}

/// Scales of rows, blocks and groups belong to one entry of a batch: each is a layer of its own, to the bit.
#[test]
fn batch_entries_are_layers_of_their_own_where_scales_are_finer_than_a_tensor() -> Result<()> {
    for name in [
        RecipeName::Rowwise,
        RecipeName::RowwiseWithGwHp,
        RecipeName::Blockwise,
        RecipeName::Mxfp8,
    ] {
        let recipe = Recipe::from(name);
        // 40 and 48 are not multiples of the blocks.
        let (x, kernel, bias) = (var(1, &[3, 5, 40]), var(2, &[3, 40, 48]), var(3, &[3, 48]));
        let gradient = tensor(4, &[3, 5, 48]);
        let held = Some(bias.as_tensor().clone());
        let config = DenseConfig::new([48]).with_batch_axis([0]);
        let layer = DenseGeneral::new(kernel.as_tensor().clone(), held, config)?.with_path("all");
        prepared(&layer)?;
        let start = kernel.as_tensor().copy()?;
        let got = steps(&layer, &recipe, [&x, &kernel, &bias], &gradient)?;
        for entry in 0..3 {
            let own = |of: &Tensor| Var::from_tensor(&of.get(entry)?);
            let vars = [own(&x)?, own(&start)?, own(&bias)?];
            let held = Some(vars[2].as_tensor().clone());
            let layer =
                DenseGeneral::new(vars[1].as_tensor().clone(), held, DenseConfig::new([48]))?;
            let layer = layer.with_path("own");
            prepared(&layer)?;
            let expected = steps(&layer, &recipe, vars.each_ref(), &gradient.get(entry)?)?;
            for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                // This recipe casts the weight for the gradient of the input tensorwise.
                if name == RecipeName::RowwiseWithGwHp && at % 4 == 1 {
                    continue;
                }
                let what = format!("{recipe}: entry {entry}, tensor {at}");
                assert_same(&what, &got.get(entry)?, expected);
            }
        }
    }
    Ok(())
}

/// The amax of a batched layer is that of the whole tensor, and a scale from the first batch is too.
#[test]
fn batch_entries_share_a_tensorwise_scale() -> Result<()> {
    for recipe in recipes() {
        let large = Tensor::new(&[[[1f32]], [[10.]], [[0.1]]], x_device())?;
        let x = Var::from_tensor(&tensor(1, &[3, 4, 16]).broadcast_mul(&large)?)?;
        let (kernel, bias) = (var(2, &[3, 16, 8]), var(3, &[3, 8]));
        let held = Some(bias.as_tensor().clone());
        let config = DenseConfig::new([8]).with_batch_axis([0]);
        let layer = DenseGeneral::new(kernel.as_tensor().clone(), held, config)?.with_path("fc");
        prepared(&layer)?;
        let amax = x.abs()?.max_all()?.to_scalar::<f32>()?;
        let gradient = tensor(4, &[3, 4, 8]);
        let all = steps(&layer, &recipe, [&x, &kernel, &bias], &gradient)?;
        for (at, tensor) in all.iter().enumerate() {
            let sum = tensor.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(sum.is_finite() && sum > 0., "{recipe}: tensor {at}");
        }
        let state = layer.fp8_state().expect("a prepared layer");
        if recipe.name().is_none_or(|name| name == RecipeName::Delayed) {
            let history = state
                .slot(Role::Input)
                .expect("a slot")
                .tensors()?
                .amax_history;
            assert_eq!(history.get(0)?.to_scalar::<f32>()?, amax, "{recipe}");
        }
    }
    Ok(())
}

fn x_device() -> &'static candle_core::Device {
    static DEVICE: std::sync::LazyLock<candle_core::Device> =
        std::sync::LazyLock::new(fp8_test_support::device);
    &DEVICE
}

/// Inputs without elements have results without elements, and gradients of zeros.
#[test]
fn empty_inputs() -> Result<()> {
    for batch_axis in [vec![], vec![0]] {
        for guarded in [false, true] {
            let dims = match batch_axis.is_empty() {
                true => vec![6, 4],
                false => vec![2, 6, 4],
            };
            let kernel = var(1, &dims);
            let config = DenseConfig::new([4])
                .with_bias(false)
                .with_batch_axis(batch_axis.clone());
            let layer =
                DenseGeneral::new(kernel.as_tensor().clone(), None, config)?.with_path("fc");
            prepared(&layer)?;
            let x = Tensor::zeros((2, 0, 6), DType::F32, x_device())?;
            let y = match guarded {
                true => with_fp8("tensorwise", || layer.forward(&x))?,
                false => layer.forward(&x)?,
            };
            assert_eq!(y.dims(), [2, 0, 4], "{batch_axis:?} {guarded}");
        }
    }
    Ok(())
}
