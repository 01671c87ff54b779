//! No update counts twice.

use crate::support::*;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use fp8::fp8_files::adapter::AdapterFile;
use fp8::load::Checkpoint;
use fp8::models::{AdapterConfig, AdapterError, Error, Model, ModelOptions, Targets, open};
use fp8::rewrite::{self, Merged, QuantizeOptions, Scheme, Source, WriteOptions, quiet};
use fp8::{Error as AnyError, FilesError};
use std::path::Path;

/// Asserts that this was refused because the updates of the adapter are in the weights.
fn assert_merged<T: std::fmt::Debug>(name: &str, outcome: Result<T, Error>) {
    match outcome {
        Err(Error::AdapterMerged { name: got }) => assert_eq!(got, name),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn a_model_refuses_an_adapter_that_it_was_merged_with() -> Outcome {
    let base = Base::new("llama");
    let mut model = base.open();
    for (name, dir) in [
        ("one", "llama.names"),
        ("other", "llama.all"),
        ("two", "llama.names"),
    ] {
        model.load_adapter(name, adapter_dir(dir))?;
    }
    assert_eq!(model.active_adapter(), Some("two"));
    model.merge_adapter("one")?;
    // The active one was equal.
    assert_eq!(model.active_adapter(), None);
    let expected = values(&model.forward(base.ids())?);
    assert_merged("two", model.set_adapter(Some("two")));
    assert_merged("two", model.merge_adapter("two"));
    for name in ["one", "three"] {
        assert_merged(name, model.load_adapter(name, adapter_dir("llama.names")));
        let dir = adapter_dir("llama.names");
        assert_merged(
            name,
            model.load_trainable_adapter(name, dir, &VarMap::new()),
        );
    }
    assert_eq!(model.adapters(), ["other", "two"]);
    assert_eq!(values(&model.forward(base.ids())?), expected);
    // Another one may be added to the same weights.
    model.merge_adapter("other")?;
    assert_ne!(values(&model.forward(base.ids())?), expected);
    Ok(())
}

#[test]
fn files_remember_what_was_merged_into_them() -> Outcome {
    let base = Base::new("llama");
    let out = tempfile::tempdir()?;
    let [merged, quantized, both] =
        ["merged", "quantized", "both"].map(|name| out.path().join(name));
    let adapter = AdapterFile::open(adapter_dir("llama.names"))?;
    let other = AdapterFile::open(adapter_dir("llama.all"))?;
    let refused = |source: &dyn Source| match Merged::new(source, &adapter).map(|_| ()) {
        Err(FilesError::Adapter(AdapterError::Merged { path })) => {
            assert_eq!(path, adapter.path());
        }
        other => panic!("{other:?}"),
    };
    let checkpoint = |dir: &Path| Checkpoint::open_dir(dir).expect("a model");
    let options = WriteOptions::new();
    let source = checkpoint(base.dir.path());
    let once = Merged::new(&source, &adapter)?;
    refused(&once);
    rewrite::dequantize(&once, &merged, None, &options, &mut quiet)?;
    refused(&checkpoint(&merged));
    let scheme = QuantizeOptions::new(Scheme::ChannelToken);
    rewrite::quantize(&checkpoint(&merged), &quantized, &scheme, &mut quiet)?;
    refused(&checkpoint(&quantized));
    // Another one may be added to the same weights, and both are remembered.
    let source = checkpoint(&merged);
    let twice = Merged::new(&source, &other)?;
    rewrite::dequantize(&twice, &both, None, &options, &mut quiet)?;
    refused(&checkpoint(&both));
    assert_eq!(checkpoint(&both).merged_adapters()?.len(), 2);

    let mut model = open(&merged, &ModelOptions::new())?;
    assert_merged(
        "again",
        model.load_adapter("again", adapter_dir("llama.names")),
    );
    model.load_adapter("other", adapter_dir("llama.all"))?;
    Ok(())
}

/// Matrices of which those of the second layer do not fit each other.
struct Unfit;

impl SimpleBackend for Unfit {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        _: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut dims = shape.dims().to_vec();
        if name.contains("layers.1.") && name.ends_with("lora_B.weight") {
            dims[1] += 1;
        }
        fp8_test_support::tensor(dims[1] as u64, &dims) * 0.2
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        Err(candle_core::Error::CannotFindTensor { path: name.into() })
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

#[test]
fn a_merge_that_fails_can_be_repeated() -> Outcome {
    let base = Base::new("llama");
    let mut model = base.open();
    let config = AdapterConfig::new(2).with_targets(Targets::names(["q_proj"]));
    let vb = VarBuilder::from_backend(Box::new(Unfit), DType::F32, Device::Cpu);
    let layers = model.add_adapter("unfit", &config, vb)?;
    assert_eq!(layers.len(), 2);
    let alone = |model: &mut Model| -> Result<Vec<f32>, Error> {
        model.set_adapter(None)?;
        Ok(values(&model.forward(base.ids())?))
    };
    let before = alone(&mut model)?;
    let mut merge = || {
        let error = model
            .merge_adapter("unfit")
            .expect_err("matrices that do not fit");
        assert!(
            matches!(error, Error::Fp8(AnyError::Candle(_))),
            "{error:?}"
        );
        alone(&mut model)
    };
    // The first layer has its update, once.
    let first = merge()?;
    assert_ne!(first, before);
    assert_eq!(merge()?, first);
    Ok(())
}
