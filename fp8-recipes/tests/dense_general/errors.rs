//! What a layer refuses, and what the message names.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{self, AxisRules, DenseConfig, DenseGeneral};
use fp8_recipes::scaled::ScaledVarMap;
use fp8_recipes::{DenseError, Error, FilesError};
use fp8_test_support::{device, tensor};

fn make(input: &[usize], config: DenseConfig) -> Result<DenseGeneral, Error> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device());
    nn::dense_general(input, config, vb.pp("block.fc"))
}

#[track_caller]
fn refused(result: Result<DenseGeneral, Error>, parts: &[&str]) -> DenseError {
    let error = match result {
        Err(Error::Dense(error)) => *error,
        other => panic!("{other:?}"),
    };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
    error
}

#[test]
fn options() {
    let cases: [(DenseConfig, &[&str]); 6] = [
        (DenseConfig::new([]), &["block.fc", "features", "[]"]),
        (DenseConfig::new([3, 0]), &["features", "[3, 0]"]),
        (DenseConfig::new([3]).with_axis([]), &["axis"]),
        (
            DenseConfig::new([3]).with_axis([4]),
            &["axis [4]", "[2, 3, 4]", "no axis 4"],
        ),
        (
            DenseConfig::new([3]).with_axis([-1, 2]),
            &["axis [-1, 2]", "twice"],
        ),
        (
            DenseConfig::new([3]).with_batch_axis([2]),
            &["batch_axis [2]", "`axis` [-1]"],
        ),
    ];
    for (config, parts) in cases {
        refused(make(&[2, 3, 4], config), parts);
    }
    refused(
        make(&[2, 0], DenseConfig::new([3])),
        &["contracted sizes", "[0]"],
    );
    refused(
        make(&[2, 8], DenseConfig::new([usize::MAX / 2, 4])),
        &[
            "the kernel",
            "[8, 9223372036854775807, 4]",
            "fits into a usize",
        ],
    );
    let batched = DenseConfig::new([3]).with_batch_axis([0]);
    refused(make(&[0, 2], batched.clone()), &["batch sizes", "[0]"]);
    refused(
        make(&[2, 2], batched.with_stored_as_matrix(true)),
        &["stored_as_matrix"],
    );
}

#[test]
fn parameters() {
    let config = || DenseConfig::new([4, 5]);
    let new = |kernel: &[usize], bias: Option<&[usize]>, config: DenseConfig| {
        DenseGeneral::new(tensor(1, kernel), bias.map(|dims| tensor(2, dims)), config)
    };
    assert!(new(&[3, 4, 5], Some(&[20]), config()).is_ok());
    refused(
        new(&[3, 20], Some(&[20]), config()),
        &["`kernel`", "[3, 20]", "[4, 5]"],
    );
    refused(
        new(&[3, 5, 4], Some(&[20]), config()),
        &["`kernel`", "[3, 5, 4]"],
    );
    refused(
        new(&[3, 4, 5], Some(&[5, 4]), config()),
        &["`bias`", "[5, 4]", "[4, 5]"],
    );
    refused(new(&[3, 4, 5], None, config()), &["`bias`"]);
    refused(
        new(&[3, 4, 5], Some(&[20]), config().with_bias(false)),
        &["no bias"],
    );
    let matrix = |dims: &[usize], contracted: &[usize]| {
        DenseGeneral::from_matrix(tensor(1, dims), None, contracted, config().with_bias(false))
    };
    refused(matrix(&[20, 3], &[3]), &["[20, 3]", "[3, 20]"]);
    refused(matrix(&[6, 20], &[2, 3]), &["[2, 3]"]);
}

#[test]
fn inputs() -> Result<(), Error> {
    let layer = make(
        &[2, 3, 4],
        DenseConfig::new([5]).with_axis([-2]).with_batch_axis([0]),
    )?;
    let call = |x: &Tensor| {
        layer
            .try_forward(x)
            .expect_err("an input that does not fit")
    };
    let contracted = call(&tensor(1, &[2, 7, 4]));
    let text = contracted.to_string();
    for part in ["block.fc", "[2, 7, 4]", "contracted", "[7]", "[3]"] {
        assert!(text.contains(part), "{text}");
    }
    let batch = call(&tensor(1, &[3, 3, 4]));
    assert!(batch.to_string().contains("batch"), "{batch}");
    assert!(matches!(
        call(&tensor(1, &[3])),
        Error::Dense(error) if matches!(*error, DenseError::Axes { .. })
    ));
    let integers = call(&Tensor::zeros((2, 3, 4), DType::U32, &device())?);
    assert!(
        matches!(integers, Error::Files(FilesError::TensorDType { .. })),
        "{integers}"
    );
    // A negative axis takes inputs with more dimensions, a positive one too if it is there.
    assert_eq!(
        layer.forward(&tensor(1, &[2, 6, 3, 4]))?.dims(),
        [2, 6, 4, 5]
    );
    Ok(())
}

#[test]
fn names_of_axes() -> Result<(), Error> {
    let rules = AxisRules::new(
        ["data", "model"],
        [
            ("batch", Some("data")),
            ("embed", None),
            ("mlp", Some("model")),
            ("heads", Some("model")),
        ],
    )?;
    let config = || DenseConfig::new([4, 5]).with_axis_rules(rules.clone());
    let named = config()
        .with_kernel_axes([Some("embed"), Some("heads"), None])
        .with_bias_axes(["heads", "embed"]);
    let layer = make(&[2, 3], named)?;
    let model = Some("model".to_string());
    assert_eq!(layer.kernel_mesh_axes(), [None, model.clone(), None]);
    assert_eq!(layer.bias_mesh_axes(), [model, None]);
    assert_eq!(make(&[2, 3], DenseConfig::new([4]))?.kernel_mesh_axes(), []);

    let kernel =
        |names: &[&'static str]| make(&[2, 3], config().with_kernel_axes(names.iter().copied()));
    let count = refused(
        kernel(&["embed", "mlp"]),
        &["`block.fc.kernel`", "3 dimensions", "embed, mlp"],
    );
    assert!(matches!(count, DenseError::AxisCount { rank: 3, .. }));
    let unknown = refused(
        kernel(&["embed", "mlp", "kv"]),
        &["`kv`", "batch, embed, mlp, heads"],
    );
    assert!(matches!(unknown, DenseError::UnknownAxis { .. }));
    let twice = refused(
        kernel(&["embed", "mlp", "heads"]),
        &["`model`", "`mlp`", "`heads`"],
    );
    assert!(matches!(twice, DenseError::MeshAxisTwice { .. }));
    let bias = config().with_bias_axes(["embed"]);
    refused(make(&[2, 3], bias), &["`block.fc.bias`", "2 dimensions"]);

    for (rule, reason) in [
        (("embed", Some("pipe")), "0 axes `pipe`"),
        (("", None), "needs a name"),
        (("batch", Some("data")), "two rules"),
    ] {
        let rules = AxisRules::new(["data", "model"], [("batch", Some("data")), rule]);
        let text = rules.expect_err("a bad rule").to_string();
        assert!(text.contains(reason), "{text}");
    }
    // Plain data: it goes to JSON and back, and is checked on the way.
    let text = serde_json::to_string(&rules).map_err(candle_core::Error::wrap)?;
    assert_eq!(serde_json::from_str::<AxisRules>(&text).ok(), Some(rules));
    let bad = text.replace("\"model\"]", "\"data\"]");
    let error = serde_json::from_str::<AxisRules>(&bad).expect_err("one axis twice");
    assert!(
        error.to_string().contains("2 axes `data`"),
        "{bad}: {error}"
    );
    Ok(())
}

/// Data of scaled parameters are not their values.
#[test]
fn scaled_parameters() -> Result<(), Error> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let layer = nn::dense_general(&[2, 3], DenseConfig::new([4]), vars.var_builder().pp("fc"));
    let text = layer.expect_err("a scaled parameter").to_string();
    assert!(
        text.contains("`fc`") && text.contains("no scaled form"),
        "{text}"
    );
    Ok(())
}
