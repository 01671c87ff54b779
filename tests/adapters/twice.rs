//! No update counts twice.

use crate::support::*;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use fp8::fp8_files::adapter::AdapterFile;
use fp8::load::Checkpoint;
use fp8::models::{AdapterConfig, AdapterError, Error, Model, ModelOptions, Targets, open};
use fp8::rewrite::{
    self, Classifier, Merged, QuantizeOptions, Scheme, Shifted, Source, WriteOptions, quiet,
};
use fp8::training::Trained;
use fp8::{Error as AnyError, FilesError};
use std::collections::BTreeMap;
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
        let (dir, vars) = (adapter_dir("llama.names"), VarMap::new());
        assert_merged(name, model.load_trainable_adapter(name, dir, &vars));
        assert_eq!(vars.all_vars().len(), 0, "left as it was");
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
    let source = checkpoint(&both);
    refused(&source);
    let known = source.merged_adapters()?;
    assert_eq!(known.len(), 2);
    // Whatever stands between a file and its rewriting keeps them.
    let shifts = BTreeMap::new();
    let between: [&dyn Source; 3] = [
        &Classifier::new(&source, &[]),
        &Shifted::new(&source, &shifts)?,
        &Trained::new(&source, &VarMap::new())?,
    ];
    for between in between {
        assert_eq!(between.merged_adapters()?, known);
    }

    let mut model = open(&merged, &ModelOptions::new())?;
    assert_merged(
        "again",
        model.load_adapter("again", adapter_dir("llama.names")),
    );
    model.load_adapter("other", adapter_dir("llama.all"))?;
    Ok(())
}

/// The file has a pooler and the adapter an update of it; a model of features leaves both out.
#[test]
fn an_encoder_refuses_an_adapter_that_is_in_its_file() -> Outcome {
    let base = Base::new("bert");
    let out = tempfile::tempdir()?;
    let adapter = AdapterFile::open(adapter_dir("bert.all"))?;
    let source = Checkpoint::open_dir(base.dir.path())?;
    let merged = Merged::new(&source, &adapter)?;
    assert!(merged.layers().iter().any(|path| path == "pooler.dense"));
    rewrite::dequantize(&merged, out.path(), None, &WriteOptions::new(), &mut quiet)?;
    let mut model = open(out.path(), &ModelOptions::new())?;
    assert_merged(
        "again",
        model.load_adapter("again", adapter_dir("bert.all")),
    );

    // A merge in memory has the same identity as one into a file.
    let mut model = base.open();
    model.load_adapter("one", adapter_dir("bert.all"))?;
    model.merge_adapter("one")?;
    assert_merged("two", model.load_adapter("two", adapter_dir("bert.all")));
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
    let vb = || VarBuilder::from_backend(Box::new(Unfit), DType::F32, Device::Cpu);
    let layers = model.add_adapter("unfit", &config, vb())?;
    assert_eq!(layers.len(), 2);
    model.add_adapter("equal", &config, vb())?;
    let alone = |model: &mut Model| -> Result<Vec<f32>, Error> {
        model.set_adapter(None)?;
        Ok(values(&model.forward(base.ids())?))
    };
    let before = alone(&mut model)?;
    model.set_adapter(Some("equal"))?;
    let merge = |model: &mut Model| {
        let error = model
            .merge_adapter("unfit")
            .expect_err("matrices that do not fit");
        assert!(
            matches!(error, Error::Fp8(AnyError::Candle(_))),
            "{error:?}"
        );
        assert_eq!(model.active_adapter(), None);
        alone(model)
    };
    // The first layer has its update, once.
    let first = merge(&mut model)?;
    assert_ne!(first, before);
    assert_eq!(merge(&mut model)?, first);
    // With an equal adapter it would have the update twice.
    assert_merged("equal", model.set_adapter(Some("equal")));
    assert_merged("new", model.add_adapter("new", &config, vb()));
    // What is left of this one counts as before.
    model.set_adapter(Some("unfit"))?;
    Ok(())
}
