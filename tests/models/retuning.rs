//! Features of a norm that a search moves to where E4M3 rounds them less.

use candle_core::{DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{FoundCodes, Model, ModelOptions, find_codes, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Shifted, WriteOptions};
use fp8_files::search::SearchOptions;
use fp8_test_support::golden_models::write_model;
use std::path::Path;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const FIRST_NORM: &str = "model.layers.0.input_layernorm";

/// A model of a family whose embeddings share large numbers in two features, as the residuals of many trained models do.
fn write(family: &str, dir: &Path) -> Outcome {
    write_model(family, dir);
    let path = dir.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
    let name = "model.embed_tokens.weight";
    let (embeddings, dtype) = (&tensors[name], tensors[name].dtype());
    let mut rows = embeddings.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    for row in &mut rows {
        row[3] = 4.;
        row[9] = -3.;
    }
    let rows = Tensor::new(rows, &Device::Cpu)?.to_dtype(dtype)?;
    tensors.insert(name.into(), rows);
    Ok(candle_core::safetensors::save(&tensors, path)?)
}

fn samples() -> Vec<Vec<u32>> {
    let token = |i: u32| (i.wrapping_mul(2_654_435_761) >> 7) % 48;
    (0..12)
        .map(|s| (0..32).map(|i| token(s * 32 + i)).collect())
        .collect()
}

/// The squared differences between the outputs of two models, and the squares of the first one's.
fn difference(a: &Model, b: &Model) -> Outcome<[f32; 2]> {
    let mut sums = [0.; 2];
    for sample in samples() {
        let ids = Tensor::from_slice(&sample, (1, sample.len()), &Device::Cpu)?;
        let (a, b) = (a.forward(&ids)?, b.forward(&ids)?);
        for (sum, x) in sums.iter_mut().zip([(&a - b)?, a]) {
            *sum += x.sqr()?.sum_all()?.to_scalar::<f32>()?;
        }
    }
    Ok(sums)
}

#[test]
fn inputs_are_rounded_less_and_high_precision_stays() -> Outcome {
    for family in ["llama", "qwen2", "phi3"] {
        let dir = tempfile::tempdir()?;
        write(family, dir.path())?;
        let (source, model) = (
            Checkpoint::open_dir(dir.path())?,
            open(dir.path(), &ModelOptions::new())?,
        );
        let find = |options: &QuantizeOptions, search: &SearchOptions| -> Outcome<FoundCodes> {
            let quiet = &mut rewrite::quiet;
            Ok(find_codes(
                &model,
                &source,
                &samples(),
                options,
                search,
                quiet,
            )?)
        };
        // 48 features are no multiple of a group of 32.
        let options = QuantizeOptions::new(Scheme::Mxfp8).with_ignore(["*.down_proj"]);
        let with = find(&options, &SearchOptions::new())?;
        assert!(
            with.retuned.iter().any(|norm| norm == FIRST_NORM),
            "{family}"
        );
        assert!(!with.chosen.shifts.is_empty(), "{family}");
        for (norm, shift) in &with.chosen.shifts {
            // What the guide says of retuning; a shift of outliers is a power of two beside it.
            let bounds = match with.shifted.contains(norm) {
                true => 0.5..=2.,
                false => 0.7..=1.42,
            };
            assert!(
                shift.iter().all(|factor| bounds.contains(factor)),
                "{norm}: {shift:?}"
            );
        }
        let shifted = Shifted::new(&source, &with.chosen.shifts)?;
        let folder = dir.path().join("shifted");
        let write = WriteOptions::new();
        let quiet = &mut rewrite::quiet;
        rewrite::dequantize(&shifted, &folder, Some(DType::F32), &write, quiet)?;
        let [missing, whole] = difference(&model, &open(&folder, &ModelOptions::new())?)?;
        assert!(missing < 1e-10 * whole, "{family}: {missing} of {whole}");

        let without = find(&options, &SearchOptions::new().with_retuning(false))?;
        assert!(without.retuned.is_empty() && without.chosen.shifts.is_empty());
        let error = |name: &str, found: FoundCodes| -> Outcome<f32> {
            let target = dir.path().join(name);
            let options = options.clone().with_chosen(found.chosen);
            rewrite::quantize(&source, &target, &options, &mut rewrite::quiet)?;
            Ok(difference(&model, &open(&target, &ModelOptions::new())?)?[0])
        };
        let (with, without) = (error("with", with)?, error("without", without)?);
        assert!(with < 0.9 * without, "{family}: {with} {without}");

        // A layer in high precision would lose bits, and scales that are not powers of two move numbers among the steps.
        let ignoring = options
            .clone()
            .with_ignore(["*.down_proj", "*.layers.0.self_attn.*"]);
        let found = find(&ignoring, &SearchOptions::new())?;
        assert!(
            !found.retuned.iter().any(|norm| norm == FIRST_NORM),
            "{family}"
        );
        let found = find(
            &QuantizeOptions::new(Scheme::ChannelToken),
            &SearchOptions::new(),
        )?;
        assert!(found.retuned.is_empty());
    }
    Ok(())
}
