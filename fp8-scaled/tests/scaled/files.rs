//! Files of scaled tensors.

use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_files::Error as FilesError;
use fp8_files::atomic::write_safetensors_atomic;
use fp8_scaled::{Error, ScaleStorage, Scaled, ScaledTree, load, save};
use std::collections::{BTreeMap, HashMap};

fn tree() -> ScaledTree {
    let mut tree = ScaledTree::default();
    let x = Tensor::new(&[1f32, -2.5, 0.], &Device::Cpu).unwrap();
    for (name, dtype) in [
        ("f16", DType::F16),
        ("bf16", DType::BF16),
        ("f32", DType::F32),
    ] {
        let data = x.to_dtype(dtype).unwrap();
        tree.insert(name, Scaled::from_parts(&data, 2f32.powi(-30)).unwrap());
    }
    let codes = Tensor::new(&[[0x38u8, 0x40]], &Device::Cpu).unwrap();
    tree.insert(
        "codes",
        Scaled::from_codes(&codes, Format::E5M2, 4.).unwrap(),
    );
    tree.insert("zero", Scaled::zeros(2, DType::F16, &Device::Cpu).unwrap());
    tree
}

#[test]
fn saved_trees_load_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    for storage in [ScaleStorage::F32, ScaleStorage::E8M0] {
        save(&path, &tree(), storage).unwrap();
        let back = load(&path, &Device::Cpu).unwrap();
        assert_eq!(back.len(), 5);
        for ((name, got), (_, expected)) in back.iter().zip(tree().iter()) {
            assert_eq!(got.dtype(), expected.dtype(), "{name}");
            let value = |x: &Scaled| {
                let x = x.to_tensor(DType::F32).unwrap().flatten_all().unwrap();
                x.to_vec1::<f32>().unwrap()
            };
            assert_eq!(value(got), value(expected), "{name}");
            if name != "zero" {
                assert_eq!(got.scale(), expected.scale(), "{name}");
            }
        }
        let zero = back.get("zero").unwrap().scale().to_f32();
        assert_eq!(zero, if storage == ScaleStorage::F32 { 0. } else { 1. });
    }
}

#[test]
fn bad_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let scale = |x: f32| Tensor::new(&[x], &Device::Cpu).unwrap();
    let data = || Tensor::zeros(2, DType::F16, &Device::Cpu).unwrap();
    let code = |x: u8| Tensor::new(&[x], &Device::Cpu).unwrap();
    let bytes = || Tensor::new(&[1u8, 2], &Device::Cpu).unwrap();
    let cases = [
        (data(), Some(scale(-1.)), "DataScale"),
        (data(), Some(scale(f32::NAN)), "DataScale"),
        (data(), Some(code(255)), "DataScale"),
        (data(), Some(code(0)), "DataScale"),
        (data(), Some(scale(3.)), "DataScale"),
        (data(), Some(data()), "TensorShape"),
        (
            data(),
            Some(scale(1.).to_dtype(DType::F16).unwrap()),
            "TensorDType",
        ),
        (bytes(), Some(scale(1.)), "TensorDType"),
        (data(), None, "ScaledPair"),
    ];
    let metadata = HashMap::from([("format".to_string(), "scaled".to_string())]);
    for (data, scale, expected) in cases {
        let mut tensors = BTreeMap::from([("w".to_string(), data)]);
        tensors.extend(scale.map(|scale| ("w.data_scale".to_string(), scale)));
        write_safetensors_atomic(&path, &tensors, Some(&metadata)).unwrap();
        let error = load(&path, &Device::Cpu).unwrap_err();
        assert!(
            format!("{error:?}").contains(expected),
            "{expected}: {error:?}"
        );
    }
    let lonely = BTreeMap::from([("w.data_scale".to_string(), scale(1.))]);
    write_safetensors_atomic(&path, &lonely, Some(&metadata)).unwrap();
    let error = load(&path, &Device::Cpu).unwrap_err();
    assert!(
        matches!(error, Error::ScaledPair { ref missing, .. } if missing == "w"),
        "{error}"
    );
    write_safetensors_atomic(&path, &lonely, None).unwrap();
    assert!(matches!(
        load(&path, &Device::Cpu),
        Err(Error::Files(FilesError::ForeignFormat { .. }))
    ));
}
