//! Copying all weights of a checkpoint into variables.

use crate::families::*;
use crate::support::*;
use candle_core::{DType, Tensor};
use candle_nn::{Init, VarMap};
use fp8_recipes::FilesError;
use fp8_recipes::load::{
    Checkpoint, DequantizeOptions, dequantize_into, dequantize_into_with, var_builder,
};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

#[test]
fn every_family_is_dequantized_in_every_dtype() -> Outcome {
    for family in families() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let case = format!("{} in {dtype:?}", family.name);
            let dir = tempfile::tempdir()?;
            let path = family.write(dir.path());
            let vars = zeros(dtype, &LAYER);
            let report =
                dequantize_into(&vars, &[&path]).map_err(|error| format!("{case}: {error}"))?;
            assert_eq!(report.dequantized, ["fc.weight"], "{case}");
            assert_eq!(report.copied, ["embed.weight"], "{case}");
            assert!(
                report.missing.is_empty() && report.unused.is_empty(),
                "{case}"
            );
            let all = named(&vars);
            let expected = Tensor::from_vec(family.weight(), (N, K), &device())?.to_dtype(dtype)?;
            assert_eq!(flat(&all[1].1), flat(&expected), "{case}");
            let embed = Tensor::new(&[[0.1f32, -2.], [3., 1e-5], [0., 7.]], &device())?;
            assert_eq!(flat(&all[0].1), flat(&embed.to_dtype(dtype)?), "{case}");
            assert!(all.iter().all(|(_, var)| var.dtype() == dtype), "{case}");
        }
    }
    Ok(())
}

#[test]
fn llamas_of_compressed_tensors_come_in_whole() -> Outcome {
    for name in ["static_tensor", "dynamic_channel"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints");
        let path = dir.join(name).join("model.safetensors");
        let checkpoint = Checkpoint::open(&[&path])?;
        let is_scale = |name: &str| name.ends_with("_scale");
        let vars = VarMap::new();
        for tensor in checkpoint
            .names()
            .into_iter()
            .filter(|name| !is_scale(name))
        {
            let dims = checkpoint.shape(tensor).ok_or("no shape")?;
            vars.get(dims, tensor, Init::Const(0.), DType::F32, &device())?;
        }
        let report = dequantize_into(&vars, &[&path])?;
        // Seven linear layers in each of two blocks.
        assert_eq!(report.dequantized.len(), 14, "{name}: {report}");
        let vb = var_builder(&[&path], DType::F32, &device())?;
        for (tensor, var) in named(&vars) {
            let expected = vb.get(var.shape(), &tensor)?;
            assert_eq!(flat(&var), flat(&expected), "{name}: {tensor}");
        }
    }
    Ok(())
}

/// Expects an error, and that nothing changes.
#[track_caller]
fn refused(vars: &VarMap, path: &Path, options: DequantizeOptions) -> FilesError {
    let before = bits(vars);
    let error = dequantize_into_with(vars, &[path], &options).unwrap_err();
    assert_eq!(bits(vars), before, "changed in spite of: {error}");
    error
}

#[test]
fn names_without_a_counterpart_are_named() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = families()[0].write(dir.path());
    let strict = DequantizeOptions::new();
    let more = zeros(
        DType::F32,
        &[
            LAYER[0],
            LAYER[1],
            ("head.bias", &[2]),
            ("head.weight", &[2, 2]),
        ],
    );
    match refused(&more, &path, strict) {
        FilesError::UnmatchedNames { missing, unused } => {
            assert_eq!(missing, ["head.bias", "head.weight"]);
            assert!(unused.is_empty());
        }
        other => panic!("{other:?}"),
    }
    let less = zeros(DType::F32, &LAYER[..1]);
    let error = refused(&less, &path, strict.allow_missing(true));
    let text = error.to_string();
    assert!(text.contains("`embed.weight` in no variable"), "{text}");
    assert!(matches!(error, FilesError::UnmatchedNames { .. }));
    // Both at once; the scales are not among them.
    let other = zeros(DType::F32, &[("fc.weight", &[N, K]), ("head", &[1])]);
    match refused(&other, &path, strict) {
        FilesError::UnmatchedNames { missing, unused } => {
            assert_eq!(
                (missing, unused),
                (vec!["head".into()], vec!["embed.weight".into()])
            );
        }
        other => panic!("{other:?}"),
    }
    // If allowed, they are reported and the others are set.
    let options = strict.allow_missing(true).allow_unused(true);
    let report = dequantize_into_with(&other, &[&path], &options)?;
    assert_eq!(
        (report.missing, report.unused),
        (vec!["head".into()], vec!["embed.weight".into()])
    );
    assert_eq!(flat(&named(&other)[0].1), families()[0].weight());
    assert_eq!(flat(&named(&other)[1].1), [0.]);
    Ok(())
}

#[test]
fn what_does_not_fit_changes_nothing() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = families()[0].write(dir.path());
    let lax = DequantizeOptions::new()
        .allow_missing(true)
        .allow_unused(true);
    let transposed = zeros(
        DType::F32,
        &[("embed.weight", &[3, 2]), ("fc.weight", &[K, N])],
    );
    match refused(&transposed, &path, lax) {
        FilesError::TensorShape {
            tensor,
            got,
            expected,
        } => {
            assert_eq!((tensor.as_str(), got), ("fc.weight", vec![N, K]));
            assert!(expected.contains("[256, 6]"), "{expected}");
        }
        other => panic!("{other:?}"),
    }
    // Integers cannot hold values; the embedding comes first and would be set.
    let vars = zeros(DType::F32, &[("embed.weight", &[3, 2])]);
    vars.get((N, K), "fc.weight", Init::Const(0.), DType::U32, &device())?;
    let error = refused(&vars, &path, lax);
    assert!(
        matches!(error, FilesError::BuilderDType { got: DType::U32 }),
        "{error:?}"
    );
    // An invalid scale.
    let mut family = families().swap_remove(0);
    family.scale.3 = f32s(&[f32::NAN]);
    let path = family.write(dir.path());
    let error = refused(&zeros(DType::F32, &LAYER), &path, DequantizeOptions::new());
    assert!(
        matches!(&error, FilesError::TensorValue { tensor, .. } if tensor == "fc.weight_scale"),
        "{error:?}"
    );
    // No file at all.
    let error = refused(&zeros(DType::F32, &LAYER), &dir.path().join("none"), lax);
    assert!(matches!(error, FilesError::Read { .. }), "{error:?}");
    Ok(())
}

#[test]
fn a_tied_variable_takes_the_one_tensor_that_is_stored() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    let tensors = [(
        "embed.weight",
        Dtype::F32,
        vec![2, 2],
        f32s(&[1., 2., 3., 4.]),
    )];
    write(&path, &tensors, None);
    let vars = zeros(DType::F32, &[("embed.weight", &[2, 2])]);
    let tied = named(&vars)[0].1.clone();
    vars.data()
        .lock()
        .unwrap()
        .insert("lm_head.weight".into(), tied);
    let report = dequantize_into(&vars, &[&path])?;
    assert!(report.missing.is_empty());
    assert_eq!(flat(&named(&vars)[1].1), [1., 2., 3., 4.]);
    // Two variables for one stored tensor, which the metadata names.
    let aliases = HashMap::from([("lm_head.weight".into(), "embed.weight".into())]);
    write(&path, &tensors, Some(aliases));
    let vars = zeros(
        DType::F32,
        &[("embed.weight", &[2, 2]), ("lm_head.weight", &[2, 2])],
    );
    let report = dequantize_into(&vars, &[&path])?;
    assert_eq!(report.copied, ["embed.weight", "lm_head.weight"]);
    assert_eq!(flat(&named(&vars)[1].1), [1., 2., 3., 4.]);
    Ok(())
}

#[test]
fn a_tied_variable_refuses_two_tensors_that_differ() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    let untied = |head: &[f32]| {
        let tensors = [
            (
                "embed.weight",
                Dtype::F32,
                vec![2, 2],
                f32s(&[1., 2., 3., 4.]),
            ),
            ("lm_head.weight", Dtype::F32, vec![2, 2], f32s(head)),
        ];
        write(&path, &tensors, None);
    };
    let vars = zeros(DType::F32, &[("embed.weight", &[2, 2])]);
    let tied = named(&vars)[0].1.clone();
    let name = "lm_head.weight".to_string();
    vars.data().lock().unwrap().insert(name, tied);
    untied(&[1., 2., 3., 5.]);
    let error = dequantize_into(&vars, &[&path]).unwrap_err();
    assert!(
        matches!(&error, FilesError::TiedValues { first, second } if first == "embed.weight" && second == "lm_head.weight"),
        "{error}"
    );
    assert_eq!(flat(&named(&vars)[0].1), [0.; 4], "nothing was changed");
    untied(&[1., 2., 3., 4.]);
    dequantize_into(&vars, &[&path])?;
    assert_eq!(flat(&named(&vars)[0].1), [1., 2., 3., 4.]);
    Ok(())
}
