//! Stored forms of a kernel, layers that wait for their first input, and first values.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use fp8_recipes::nn::{
    self, Activation, DenseConfig, DenseGeneral, FanMode, InitDistribution, Initializer,
};
use fp8_recipes::{DenseError, Error, prepare_fp8, with_fp8};
use fp8_test_support::{assert_same, flat64, tensor};
use std::collections::HashMap;

fn builder(vars: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(vars, DType::F32, &fp8_test_support::device())
}

fn file(tensors: &[(&str, Tensor)]) -> VarBuilder<'static> {
    let tensors = tensors
        .iter()
        .map(|(name, tensor)| (name.to_string(), tensor.clone()));
    let tensors: HashMap<String, Tensor> = tensors.collect();
    VarBuilder::from_tensors(tensors, DType::F32, &fp8_test_support::device())
}

fn published() -> DenseConfig {
    DenseConfig::new([4, 5]).with_axis([1, -1])
}

const SHAPE: [usize; 4] = [2, 3, 6, 7];

/// The published test of fp8layers: shapes, and the same values from each form.
#[test]
fn one_kernel_in_three_forms() -> fp8_recipes::Result<()> {
    let (kernel, bias) = (tensor(1, &[3, 7, 4, 5]), tensor(2, &[4, 5]));
    let matrix = kernel.reshape((21, 20))?;
    let x = tensor(3, &SHAPE);
    let of = |tensors: &[(&str, Tensor)]| {
        let layer = nn::dense_general(&SHAPE, published(), file(tensors).pp("fc"))?;
        let kernel = layer.kernel()?;
        Ok::<_, Error>((layer.forward(&x)?, kernel))
    };
    let flax = of(&[("fc.kernel", kernel.clone()), ("fc.bias", bias.clone())])?;
    assert_eq!(flax.0.dims(), [2, 6, 4, 5]);
    assert_same("kernel", &flax.1, &kernel);
    let flat_bias = bias.flatten_all()?;
    let fp8layers = of(&[("fc.kernel", matrix.clone()), ("fc.bias", bias.clone())])?;
    let exported = [
        ("fc.weight", matrix.t()?.contiguous()?),
        ("fc.bias", flat_bias.clone()),
    ];
    for (name, other) in [("fp8layers", fp8layers), ("exported", of(&exported)?)] {
        assert_same(name, &other.0, &flax.0);
        assert_same(name, &other.1, &kernel);
    }
    let direct = DenseGeneral::from_matrix(matrix, Some(flat_bias), &[3, 7], published())?;
    assert_same("from_matrix", &direct.forward(&x)?, &flax.0);
    assert_eq!(
        direct.stored_kernel().map(Tensor::dims),
        Some(&[21, 20][..])
    );
    Ok(())
}

/// A matrix in a VarMap stays the variable that is trained.
#[test]
fn a_stored_matrix_is_the_variable() -> fp8_recipes::Result<()> {
    let vars = VarMap::new();
    let config = published()
        .with_stored_as_matrix(true)
        .with_kernel_axes(["embed", "mlp"]);
    let layer = nn::dense_general(&SHAPE, config.clone(), builder(&vars).pp("fc"))?;
    let again = nn::dense_general(&SHAPE, published(), builder(&vars).pp("fc"))?;
    assert_eq!(layer.kernel()?.dims(), [3, 7, 4, 5]);
    let names: Vec<String> = vars
        .data()
        .lock()
        .expect("a lock")
        .keys()
        .cloned()
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let y = again.forward(&tensor(3, &SHAPE))?;
    let grads = fp8_recipes::backward(&y.sqr()?.sum_all()?)?;
    for var in vars.all_vars() {
        let grad = grads.get(&var).expect("a gradient");
        assert_eq!(grad.dims(), var.dims());
    }
    Ok(())
}

#[test]
fn stored_tensors_that_do_not_fit_are_named() -> Result<()> {
    let make = |tensors: &[(&str, Tensor)], config: DenseConfig| match nn::dense_general(
        &SHAPE,
        config,
        file(tensors).pp("fc"),
    ) {
        Err(Error::Dense(error)) => *error,
        other => panic!("{other:?}"),
    };
    let (kernel, weight) = (tensor(1, &[3, 7, 4, 5]), tensor(2, &[20, 21]));
    let both = make(
        &[("fc.kernel", kernel.clone()), ("fc.weight", weight)],
        published(),
    );
    assert!(
        matches!(&both, DenseError::Ambiguous { path, .. } if path == "fc"),
        "{both}"
    );
    // A transposed matrix is not one of the forms.
    let shape = make(&[("fc.kernel", tensor(1, &[20, 21]))], published());
    let text = shape.to_string();
    for part in ["`fc.kernel`", "[20, 21]", "[3, 7, 4, 5]", "[21, 20]"] {
        assert!(text.contains(part), "{text}");
    }
    // fp8layers has no batch axes: a matrix could be of any of their entries.
    let batched = published()
        .with_axis([-1])
        .with_batch_axis([0])
        .with_bias(false);
    let matrix = make(&[("fc.kernel", tensor(1, &[14, 20]))], batched.clone());
    assert!(matches!(matrix, DenseError::StoredShape { .. }), "{matrix}");
    let weight = make(&[("fc.weight", tensor(1, &[20, 14]))], batched);
    assert!(matches!(weight, DenseError::StoredShape { .. }), "{weight}");
    let bias = make(
        &[("fc.kernel", kernel), ("fc.bias", tensor(2, &[5, 4]))],
        published(),
    );
    assert!(bias.to_string().contains("`fc.bias`"), "{bias}");
    // A VarMap does not tell the shape of a variable, except in its own error.
    let vars = VarMap::new();
    builder(&vars).pp("fc").get((20, 21), "kernel")?;
    let other = nn::dense_general(&SHAPE, published(), builder(&vars).pp("fc"));
    let text = other.expect_err("another shape").to_string();
    assert!(
        text.contains("fc.kernel") && text.contains("[20, 21]"),
        "{text}"
    );
    // A variable under an exported name would be read, but not trained.
    let vars = VarMap::new();
    builder(&vars).pp("fc").get((20, 21), "weight")?;
    let trained = nn::dense_general(&SHAPE, published(), builder(&vars).pp("fc"));
    let text = trained.expect_err("a variable").to_string();
    assert!(
        text.contains("`fc.weight`") && text.contains("`kernel`"),
        "{text}"
    );
    Ok(())
}

#[test]
fn a_first_input_gives_the_sizes() -> fp8_recipes::Result<()> {
    let vars = VarMap::new();
    let config = DenseConfig::new([6, 2]).with_activation(Activation::Relu);
    let layer = nn::Dense::new(config, builder(&vars).pp("fc"));
    let clone = layer.clone();
    assert!(vars.all_vars().is_empty());
    let error = layer.get().expect_err("no parameters");
    assert!(error.to_string().contains("`fc`"), "{error}");
    // Nothing can have prepared it.
    assert_eq!(prepare_fp8(&layer, &Default::default())?.layers.len(), 0);
    let x = tensor(1, &[3, 10]);
    let refused = with_fp8("delayed", || layer.try_forward(&x));
    assert!(matches!(
        refused,
        Err(Error::Dense(error)) if matches!(*error, DenseError::NotInitialized { .. })
    ));
    assert!(vars.all_vars().is_empty());

    let y = layer.forward(&x)?;
    assert_eq!(y.dims(), [3, 6, 2]);
    assert!(flat64(&y).iter().all(|y| *y >= 0.) && flat64(&y).iter().any(|y| *y > 0.));
    assert_eq!(clone.get()?.kernel()?.dims(), [10, 6, 2]);
    assert_same("a clone", &clone.forward(&x)?, &y);
    assert_eq!(prepare_fp8(&layer, &Default::default())?.converted(), 1);
    let in_fp8 = with_fp8("tensorwise", || layer.try_forward(&x))?;
    assert!(flat64(&in_fp8) != flat64(&y));
    let error = layer
        .try_forward(&tensor(1, &[3, 11]))
        .expect_err("another width");
    assert!(
        matches!(&error, Error::Dense(error) if matches!(**error, DenseError::Sizes { .. })),
        "{error}"
    );
    // It reads a file as well as it makes variables.
    let stored = file(&[
        ("fc.kernel", tensor(5, &[10, 12])),
        ("fc.bias", tensor(6, &[12])),
    ]);
    let read = nn::Dense::new(DenseConfig::new([6, 2]), stored.pp("fc"));
    assert_same(
        "read",
        &read.initialize(&[1, 10])?.kernel()?,
        &tensor(5, &[10, 6, 2]),
    );
    Ok(())
}

/// Means and variances of 40 000 values; bounds are five standard deviations of the estimates.
#[test]
fn initializers_have_the_variances_of_flax() -> fp8_recipes::Result<()> {
    let scaled = |scale, mode, distribution| Initializer::VarianceScaling {
        scale,
        mode,
        distribution,
    };
    let (fan_in, fan_out) = (100., 400.);
    let cases = [
        (Initializer::lecun_normal(), 1. / fan_in),
        (Initializer::lecun_uniform(), 1. / fan_in),
        (Initializer::glorot_normal(), 2. / (fan_in + fan_out)),
        (Initializer::glorot_uniform(), 2. / (fan_in + fan_out)),
        (Initializer::he_normal(), 2. / fan_in),
        (Initializer::he_uniform(), 2. / fan_in),
        (
            scaled(3., FanMode::FanOut, InitDistribution::Normal),
            3. / fan_out,
        ),
        (
            Initializer::TruncatedNormal { stddev: 0.5 },
            (0.5f64 * 0.879_625_661_034_239_8).powi(2),
        ),
    ];
    let count = fan_in * fan_out;
    for (init, variance) in cases {
        let values = init.matrix([100, 400], DType::F32, &Device::Cpu, 7)?;
        assert_same(
            "a seed",
            &values,
            &init.matrix([100, 400], DType::F32, &Device::Cpu, 7)?,
        );
        assert_eq!(values.dims(), [100, 400]);
        let values = flat64(&values);
        let mean = values.iter().sum::<f64>() / count;
        assert!(
            mean.abs() < 5. * (variance / count).sqrt(),
            "{init:?}: mean {mean}"
        );
        let got = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        // The fourth moment of a normal distribution is 3, the largest of these.
        assert!(
            (got / variance - 1.).abs() < 5. * (2. / count).sqrt(),
            "{init:?}: {got}, {variance}"
        );
        let largest = values.iter().fold(0f64, |max, x| max.max(x.abs())) / variance.sqrt();
        let limit = match init {
            Initializer::VarianceScaling {
                distribution: InitDistribution::Uniform,
                ..
            } => 3f64.sqrt(),
            Initializer::VarianceScaling {
                distribution: InitDistribution::Normal,
                ..
            } => 6.,
            _ => 2. / 0.879_625_661_034_239_8,
        };
        assert!(
            largest <= limit * 1.000_001 && largest > limit * 0.6,
            "{init:?}: {largest}"
        );
    }
    let kaiming: Initializer = candle_nn::init::DEFAULT_KAIMING_NORMAL.into();
    let values = flat64(&kaiming.matrix([100, 400], DType::F32, &Device::Cpu, 0)?);
    let got = values.iter().map(|x| x * x).sum::<f64>() / count;
    assert!(
        (got * fan_in / 2. - 1.).abs() < 0.05,
        "candle's, by the fan of the inputs: {got}"
    );
    Ok(())
}

#[test]
fn orthogonal_matrices_are() -> fp8_recipes::Result<()> {
    for [rows, cols] in [[5, 12], [12, 5], [8, 8]] {
        let init = Initializer::Orthogonal { scale: 3. };
        let matrix = init.matrix([rows, cols], DType::F64, &Device::Cpu, 1)?;
        let product = match rows <= cols {
            true => matrix.matmul(&matrix.t()?)?,
            false => matrix.t()?.matmul(&matrix)?,
        };
        let few = rows.min(cols);
        for (i, value) in flat64(&product).into_iter().enumerate() {
            let expected = if i / few == i % few { 9. } else { 0. };
            assert!(
                (value - expected).abs() < 1e-12,
                "{rows}x{cols}: {value}, {expected}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_new_layer_begins_with_its_initializers() -> fp8_recipes::Result<()> {
    let config = DenseConfig::new([40])
        .with_seed(3)
        .with_bias_init(Init::Const(0.5));
    let make = |config: DenseConfig| {
        let vars = VarMap::new();
        let layer = nn::dense_general(&[1, 30], config, builder(&vars).pp("fc"))?;
        Ok::<_, Error>((layer.kernel()?, layer.bias().cloned().expect("a bias")))
    };
    let (kernel, bias) = make(config.clone())?;
    assert_same("a seed", &kernel, &make(config.clone())?.0);
    assert!(flat64(&kernel) != flat64(&make(config.clone().with_seed(4))?.0));
    let drawn = |()| make(config.clone().with_seed(None));
    assert!(flat64(&drawn(())?.0) != flat64(&drawn(())?.0));
    assert!(flat64(&bias).iter().all(|b| *b == 0.5));
    let expected = Initializer::lecun_normal().matrix([30, 40], DType::F32, &Device::Cpu, 3)?;
    assert_eq!(flat64(&kernel), flat64(&expected));
    // flax counts batch entries among the inputs.
    let config = DenseConfig::new([40])
        .with_batch_axis([0])
        .with_seed(3)
        .with_bias(false);
    let batched = nn::dense_general(&[4, 1, 25], config, builder(&VarMap::new()))?;
    let expected = Initializer::lecun_normal().matrix([100, 40], DType::F32, &Device::Cpu, 3)?;
    assert_eq!(flat64(&batched.kernel()?), flat64(&expected));
    let bad = Initializer::Orthogonal { scale: f64::NAN };
    let error = bad
        .matrix([2, 2], DType::F32, &Device::Cpu, 0)
        .expect_err("NaN");
    assert!(error.to_string().contains("NaN"), "{error}");
    Ok(())
}

/// A VarBuilder that makes tensors of any name holds none of them.
#[test]
fn zeros_are_not_a_stored_form() -> fp8_recipes::Result<()> {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let layer = nn::dense_general(&SHAPE, published(), vb.pp("fc"))?;
    assert_eq!(
        flat64(&layer.forward(&Tensor::ones(&SHAPE, DType::F32, &Device::Cpu)?)?),
        [0.; 240]
    );
    let missing = nn::dense_general(&SHAPE, published(), file(&[]).pp("fc"));
    let text = missing.expect_err("an empty file").to_string();
    assert!(text.contains("fc.kernel"), "{text}");
    Ok(())
}
