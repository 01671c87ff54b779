//! Codes that a search finds: files like those of plain rounding, with outputs closer to high precision.

use candle_core::{DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{Error, FoundCodes, Model, ModelOptions, find_codes, of_checkpoint, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Spelling};
use fp8_files::Error as FilesError;
use fp8_files::search::SearchOptions;
use fp8_test_support::golden_models::write_model;
use fp8_test_support::language_model;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Samples of 32 tokens below `vocab`, different for each seed.
fn samples(vocab: u32, count: u32, seed: u32) -> Vec<Vec<u32>> {
    let token = |i: u32| (i.wrapping_mul(2_654_435_761) >> 7) % vocab;
    let sample = |s: u32| (0..32).map(|i| token(seed * 10_000 + s * 32 + i)).collect();
    (0..count).map(sample).collect()
}

fn search(
    model: &Model,
    source: &Checkpoint,
    samples: &[Vec<u32>],
    options: &QuantizeOptions,
) -> fp8::models::Result<FoundCodes> {
    let search = SearchOptions::new();
    find_codes(
        model,
        source,
        samples,
        options,
        &search,
        &mut rewrite::quiet,
    )
}

/// Name, dtype and shape of every tensor in a folder, and its configuration.
fn form(dir: &Path) -> (BTreeMap<String, (String, Vec<usize>)>, String) {
    let bytes = std::fs::read(dir.join("model.safetensors")).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        (
            name,
            (format!("{:?}", tensor.dtype()), tensor.shape().to_vec()),
        )
    });
    let config = std::fs::read_to_string(dir.join("config.json")).expect("a configuration");
    (tensors.collect(), config)
}

/// The sum of squared differences of the outputs for some samples.
fn difference(a: &Model, b: &Model, samples: &[Vec<u32>]) -> Result<f32, fp8::models::Error> {
    let mut sum = 0.;
    for sample in samples {
        let ids = Tensor::from_slice(sample, (1, sample.len()), &Device::Cpu)?;
        let difference = (a.forward(&ids)? - b.forward(&ids)?)?;
        sum += difference.sqr()?.sum_all()?.to_scalar::<f32>()?;
    }
    Ok(sum)
}

#[test]
fn files_have_the_form_of_plain_rounding_and_smaller_errors() -> Outcome {
    let dir = tempfile::tempdir()?;
    language_model::write(dir.path());
    let source = Checkpoint::open_dir(dir.path())?;
    let model = open(dir.path(), &ModelOptions::new())?;
    let (seen, other) = (samples(256, 24, 1), samples(256, 24, 2));
    for (scheme, spelling) in [
        (Scheme::ChannelToken, Spelling::CompressedTensors),
        (Scheme::ChannelToken, Spelling::ModelOpt),
        (Scheme::Block128, Spelling::CompressedTensors),
        (Scheme::Mxfp8, Spelling::CompressedTensors),
        (Scheme::TensorToken, Spelling::AutoFp8),
    ] {
        let options = QuantizeOptions::new(scheme).with_spelling(spelling);
        if scheme == Scheme::Block128 {
            // Its groups of inputs are longer than this model's.
            let error = search(&model, &source, &seen, &options).expect_err("ragged groups");
            let Error::Fp8(fp8::Error::Files(FilesError::NotExportable { reason, .. })) = &error
            else {
                panic!("{error:?}");
            };
            assert!(
                reason.contains("not a multiple of groups of 128"),
                "{reason}"
            );
            continue;
        }
        let found = search(&model, &source, &seen, &options)?;
        assert_eq!((found.chosen.codes.len(), found.errors.len()), (14, 14));
        assert!(found.plain.is_empty());
        assert!(found.errors.iter().all(|layer| layer.found <= layer.plain));
        let write =
            |name: &str, options: &QuantizeOptions| -> Result<Model, Box<dyn std::error::Error>> {
                let target = dir.path().join(format!("{name}-{scheme}-{spelling}"));
                rewrite::quantize(&source, &target, options, &mut rewrite::quiet)?;
                Ok(open(&target, &ModelOptions::new())?)
            };
        let plain = write("plain", &options)?;
        let searched = write("searched", &options.clone().with_chosen(found.chosen))?;
        let folder = |name: &str| dir.path().join(format!("{name}-{scheme}-{spelling}"));
        assert_eq!(form(&folder("searched")), form(&folder("plain")));
        // Tokens of other samples share nothing with these but the model, which is random: there only a limit holds.
        for (samples, bound) in [(&seen, 1.), (&other, 1.5)] {
            let (found, plain) = (
                difference(&model, &searched, samples)?,
                difference(&model, &plain, samples)?,
            );
            assert!(
                found < bound * plain,
                "{scheme} {spelling}: {found} {plain}"
            );
        }
    }
    Ok(())
}

#[test]
fn codes_of_a_layer_that_is_not_quantized_are_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    language_model::write(dir.path());
    let source = Checkpoint::open_dir(dir.path())?;
    let model = open(dir.path(), &ModelOptions::new())?;
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let found = search(&model, &source, &samples(256, 8, 1), &options)?;
    let mut chosen = found.chosen;
    let renamed = chosen.codes.into_iter();
    chosen.codes = renamed
        .map(|(path, codes)| (format!("other.{path}"), codes))
        .collect();
    let options = options.with_chosen(chosen);
    let target = dir.path().join("fp8");
    let error = rewrite::quantize(&source, &target, &options, &mut rewrite::quiet);
    let error = error.expect_err("an error").to_string();
    assert!(
        error.contains("`other.model.layers.0.mlp.down_proj`, which is not among"),
        "{error}"
    );
    assert!(!target.exists());
    Ok(())
}

#[test]
fn every_family_is_searched() -> Outcome {
    for family in [
        "llama",
        "qwen2",
        "phi3",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "bert",
    ] {
        let dir = tempfile::tempdir()?;
        write_model(family, dir.path());
        let source = Checkpoint::open_dir(dir.path())?;
        let model = open(dir.path(), &ModelOptions::new())?;
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let found = search(&model, &source, &samples(48, 8, 3), &options)?;
        let layers = rewrite::layers_to_quantize(&source, &options)?;
        assert_eq!(
            found.chosen.codes.len() + found.plain.len(),
            layers.len(),
            "{family}"
        );
        // The pooler of BERT is not among its blocks.
        let outside = |path: &String| path.contains(".experts.") || path == "pooler.dense";
        assert!(
            found.plain.iter().all(outside) && found.plain.len() < 4,
            "{family}: {:?}",
            found.plain
        );
        let target = dir.path().join("fp8");
        let options = options.with_chosen(found.chosen);
        let report = rewrite::quantize(&source, &target, &options, &mut rewrite::quiet)?;
        assert_eq!(report.quantized.len(), layers.len());
        let again = open(&target, &ModelOptions::new())?;
        let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
        let y = again.forward(&ids)?.to_dtype(DType::F32)?.flatten_all()?;
        assert!(y.to_vec1::<f32>()?.iter().all(|y| y.is_finite()));
    }
    Ok(())
}

#[test]
fn ignored_layers_and_the_head_are_not_searched() -> Outcome {
    let dir = tempfile::tempdir()?;
    language_model::write(dir.path());
    let source = Checkpoint::open_dir(dir.path())?;
    let model = open(dir.path(), &ModelOptions::new())?;
    let options = QuantizeOptions::new(Scheme::ChannelToken)
        .with_ignore(["*.o_proj", "*.q_proj"])
        .with_head(true);
    let found = search(&model, &source, &samples(256, 4, 1), &options)?;
    assert_eq!(found.chosen.codes.len(), 10);
    assert_eq!(found.plain, ["lm_head"]);
    // The same codes for every run.
    let again = search(&model, &source, &samples(256, 4, 1), &options)?;
    for (path, codes) in &found.chosen.codes {
        let codes = codes.codes().to_vec2::<u8>()?;
        assert_eq!(
            codes,
            again.chosen.codes[path].codes().to_vec2::<u8>()?,
            "{path}"
        );
    }
    Ok(())
}

#[test]
fn what_cannot_be_searched_is_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    language_model::write(dir.path());
    let source = Checkpoint::open_dir(dir.path())?;
    let model = open(dir.path(), &ModelOptions::new())?;
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let error =
        |model: &Model, source: &Checkpoint, samples: &[Vec<u32>], options: &QuantizeOptions| {
            search(model, source, samples, options).expect_err("an error")
        };
    for (samples, part) in [
        (vec![], "0 tokens in 0 samples, expected at least 64"),
        (vec![vec![1; 20]], "20 tokens in 1 samples"),
        (
            vec![vec![1; 64], vec![1; 65]],
            "sample 1 has 65 tokens, the model has positions for 64",
        ),
    ] {
        let error = error(&model, &source, &samples, &options);
        assert!(matches!(error, Error::Samples { .. }));
        assert!(error.to_string().contains(part), "{error}");
    }
    let fine = samples(256, 2, 1);
    let unknown = error(&model, &source, &[vec![256; 64]], &options);
    assert!(matches!(unknown, Error::TokenIds { .. }), "{unknown}");
    let fixed = QuantizeOptions::new(Scheme::StaticTensor);
    let amax = error(&model, &source, &fine, &fixed).to_string();
    assert!(amax.contains("model.layers.0.mlp.down_proj"), "{amax}");

    let search = SearchOptions::new();
    let stop = &mut |_: rewrite::Progress<'_>| ControlFlow::Break(());
    let stopped = find_codes(&model, &source, &fine, &options, &search, stop);
    let stopped = stopped.expect_err("cancelled").to_string();
    assert!(stopped.contains("cancelled"), "{stopped}");

    // Codes of another scheme do not fit, and a model that holds codes shows no weights.
    let found = find_codes(
        &model,
        &source,
        &fine,
        &options,
        &search,
        &mut rewrite::quiet,
    )?;
    let other = QuantizeOptions::new(Scheme::DynamicTensor).with_chosen(found.chosen);
    let target = dir.path().join("fp8");
    let unfit = rewrite::quantize(&source, &target, &other, &mut rewrite::quiet);
    let unfit = unfit.expect_err("another granularity").to_string();
    assert!(
        unfit.contains("tensorwise scales, not in e4m3 with rowwise ones"),
        "{unfit}"
    );
    assert!(!target.exists());
    rewrite::quantize(&source, &target, &options, &mut rewrite::quiet)?;
    let coded = Checkpoint::open_dir(&target)?;
    let served = of_checkpoint(
        Checkpoint::open_dir(&target)?,
        &target,
        &ModelOptions::new(),
    )?;
    let held = error(&served, &coded, &fine, &options);
    assert!(matches!(held, Error::NotSearchable { .. }));
    assert!(
        held.to_string()
            .contains("open the model in high precision"),
        "{held}"
    );
    Ok(())
}
