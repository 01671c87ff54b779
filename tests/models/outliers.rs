//! Outliers of norms' results: a search moves them into the weights.

use candle_core::{Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{FoundCodes, Model, ModelOptions, find_codes, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Shifted, WriteOptions};
use fp8_files::search::{Chosen, SearchOptions, inverse_shift};
use fp8_test_support::golden_models::write_model;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// The layers that read a norm, by their own names, as the families' papers and files have them.
const READERS: [(&str, &[&str]); 4] = [
    (
        "input_layernorm",
        &[
            "q_proj",
            "k_proj",
            "v_proj",
            "qkv_proj",
            "q_a_proj",
            "kv_a_proj_with_mqa",
        ],
    ),
    (
        "post_attention_layernorm",
        &["gate", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3"],
    ),
    ("q_a_layernorm", &["q_b_proj"]),
    ("kv_a_layernorm", &["kv_b_proj"]),
];

/// For each norm an outlier: feature 3 is 2^15 times as large, and its weights are divided by that.
fn outliers(model: &Checkpoint) -> BTreeMap<String, Vec<f32>> {
    let mut shifts = BTreeMap::new();
    let names = model.names();
    for norm in &names {
        let parts: Vec<&str> = norm.split('.').collect();
        let [.., own, "weight"] = parts.as_slice() else {
            continue;
        };
        let Some((_, readers)) = READERS.iter().find(|(norm, _)| norm == own) else {
            continue;
        };
        let features = model.shape(norm).expect("a norm")[0];
        let mut shift = vec![1f32; features];
        shift[3] = 32768.;
        let layer = parts[..3].join(".") + ".";
        for name in names.iter().filter(|name| name.starts_with(&layer)) {
            let reads = readers
                .iter()
                .any(|own| name.ends_with(&format!(".{own}.weight")));
            if reads {
                shifts.insert(name.to_string(), inverse_shift(&shift));
            }
        }
        shifts.insert(norm.to_string(), shift);
    }
    shifts
}

/// A model of a family with outliers, and the same without them.
struct Pair {
    dir: tempfile::TempDir,
    source: Checkpoint,
    model: Model,
    plain: Model,
}

impl Pair {
    fn new(family: &str) -> Outcome<Self> {
        let dir = tempfile::tempdir()?;
        let (plain, planted) = (dir.path().join("plain"), dir.path().join("planted"));
        std::fs::create_dir(&plain)?;
        write_model(family, &plain);
        let file = Checkpoint::open_dir(&plain)?;
        let shifts = outliers(&file);
        assert!(shifts.len() > 4, "{family}: {shifts:?}");
        let shifted = Shifted::new(&file, &shifts)?;
        let write = WriteOptions::new();
        rewrite::dequantize(&shifted, &planted, None, &write, &mut rewrite::quiet)?;
        Ok(Self {
            source: Checkpoint::open_dir(&planted)?,
            model: open(&planted, &ModelOptions::new())?,
            plain: open(&plain, &ModelOptions::new())?,
            dir,
        })
    }

    fn search(&self, options: &QuantizeOptions, search: &SearchOptions) -> Outcome<FoundCodes> {
        let (model, source) = (&self.model, &self.source);
        let quiet = &mut rewrite::quiet;
        Ok(find_codes(
            model,
            source,
            &samples(),
            options,
            search,
            quiet,
        )?)
    }

    fn quantize(&self, name: &str, options: &QuantizeOptions) -> Outcome<PathBuf> {
        let target = self.dir.path().join(name);
        rewrite::quantize(&self.source, &target, options, &mut rewrite::quiet)?;
        Ok(target)
    }

    /// The sum of squared differences of a quantized model's outputs from those of the model.
    fn difference(&self, target: &Path) -> Outcome<f32> {
        let other = open(target, &ModelOptions::new())?;
        let mut sum = 0.;
        for sample in samples() {
            let ids = Tensor::from_slice(&sample, (1, sample.len()), &Device::Cpu)?;
            let difference = (self.model.forward(&ids)? - other.forward(&ids)?)?;
            sum += difference.sqr()?.sum_all()?.to_scalar::<f32>()?;
        }
        Ok(sum)
    }
}

fn samples() -> Vec<Vec<u32>> {
    let token = |i: u32| (i.wrapping_mul(2_654_435_761) >> 7) % 48;
    (0..12)
        .map(|s| (0..32).map(|i| token(s * 32 + i)).collect())
        .collect()
}

fn bits(model: &Model, sample: &[u32]) -> Outcome<Vec<u32>> {
    let ids = Tensor::from_slice(sample, (1, sample.len()), &Device::Cpu)?;
    let logits = model.forward(&ids)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(logits.into_iter().map(f32::to_bits).collect())
}

#[test]
fn shifts_change_no_bit_in_high_precision_and_outliers_cost_little() -> Outcome {
    for family in [
        "llama",
        "qwen2",
        "phi3",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
    ] {
        let pair = Pair::new(family)?;
        for sample in samples() {
            let (planted, plain) = (bits(&pair.model, &sample)?, bits(&pair.plain, &sample)?);
            assert!(planted == plain, "{family}");
        }
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let search = SearchOptions::new();
        let found = pair.search(&options, &search)?;
        assert!(!found.shifted.is_empty(), "{family}");
        assert!(found.errors.iter().all(|layer| layer.found <= layer.plain));
        // The norms and their readers in the files, without the codes: still the same to the bit.
        let shifted = Shifted::new(&pair.source, &found.chosen.shifts)?;
        let folder = pair.dir.path().join("shifted");
        let write = WriteOptions::new();
        rewrite::dequantize(&shifted, &folder, None, &write, &mut rewrite::quiet)?;
        let moved = open(&folder, &ModelOptions::new())?;
        for sample in samples() {
            let (moved, plain) = (bits(&moved, &sample)?, bits(&pair.plain, &sample)?);
            assert!(moved == plain, "{family}");
        }

        let without = pair.search(&options, &search.with_outliers(false))?;
        assert!(without.shifted.is_empty() && without.chosen.shifts.is_empty());
        let with = pair.quantize("with", &options.clone().with_chosen(found.chosen))?;
        let without = pair.quantize("without", &options.with_chosen(without.chosen))?;
        let (with, without) = (pair.difference(&with)?, pair.difference(&without)?);
        assert!(with < 0.5 * without, "{family}: {with} {without}");
    }
    Ok(())
}

#[test]
fn layers_in_high_precision_are_divided_and_static_scales_follow() -> Outcome {
    let pair = Pair::new("llama")?;
    let amaxes = rewrite::input_amaxes(&pair.model, || {
        for sample in samples() {
            let ids = Tensor::from_slice(&sample, (1, sample.len()), &Device::Cpu)?;
            pair.model.forward(&ids).map_err(candle_core::Error::from)?;
        }
        Ok(())
    })?;
    for (scheme, ignored) in [
        (Scheme::StaticTensor, "nothing"),
        (Scheme::TensorToken, "*.q_proj"),
        (Scheme::ChannelToken, "*.up_proj"),
    ] {
        let options = QuantizeOptions::new(scheme)
            .with_ignore([ignored])
            .with_input_amaxes(amaxes.clone());
        let found = pair.search(&options, &SearchOptions::new())?;
        let moved = &found.chosen.input_amaxes;
        for (path, amax) in moved {
            assert!(*amax < 0.01 * amaxes[path], "{path}: {amax}");
        }
        assert_eq!(!moved.is_empty(), scheme == Scheme::StaticTensor);
        let with = pair.quantize(
            &format!("{scheme}"),
            &options.clone().with_chosen(found.chosen),
        )?;
        let search = SearchOptions::new().with_outliers(false);
        let without = pair.search(&options, &search)?;
        let without = pair.quantize(
            &format!("{scheme}-without"),
            &options.with_chosen(without.chosen),
        )?;
        let (with, without) = (pair.difference(&with)?, pair.difference(&without)?);
        assert!(with < 0.5 * without, "{scheme}: {with} {without}");
    }
    Ok(())
}

#[test]
fn shifts_that_do_not_fit_the_model_are_refused() -> Outcome {
    let pair = Pair::new("llama")?;
    let target = pair.dir.path().join("refused");
    let norm = "model.layers.0.input_layernorm.weight";
    let zeros = vec![0.; pair.source.shape(norm).expect("a norm")[0]];
    for (name, shift, part) in [
        (
            "model.layers.9.norm.weight",
            vec![2.],
            "model.layers.9.norm.weight",
        ),
        (norm, vec![2., 4.], "2 features, one for each factor"),
        (norm, zeros, "a factor, positive and finite"),
    ] {
        let mut chosen = Chosen::default();
        chosen.shifts.insert(name.into(), shift);
        let options = QuantizeOptions::new(Scheme::ChannelToken).with_chosen(chosen);
        let error = rewrite::quantize(&pair.source, &target, &options, &mut rewrite::quiet);
        let error = error.expect_err("an error").to_string();
        assert!(error.contains(part), "{error}");
        assert!(!target.exists());
    }
    Ok(())
}
