//! What generates and what trains agree: the logits of tokens one by one over a cache, in parts, and together with other sequences have
//! the bits of those of the whole sequence.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_candle::ops::cross_entropy;
use fp8::load::Checkpoint;
use fp8::models::{self, AdapterConfig, CausalLm, Llama, Model, ModelOptions, Targets};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8::training::TrainableModel;
use fp8::{Autocast, FilesError, Recipe, fp8_autocast, with_fp8};
use fp8_test_support::golden_models::{configs, write_model};
use fp8_test_support::{bits, normal};
use std::path::Path;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Tokens of the golden models.
const VOCABULARY: u32 = 48;

fn tokens(sequence: usize, count: usize) -> Vec<u32> {
    let token = |i: usize| (i * (7 + sequence) + 11 * sequence + i * i / 5) as u32 % VOCABULARY;
    (0..count).map(token).collect()
}

fn rows(ids: &[u32]) -> Tensor {
    Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).expect("ids")
}

/// Rows of tokens that reach all experts of a layer.
fn many() -> Tensor {
    let ids = (0..30).flat_map(|i| tokens(i, 16)).collect::<Vec<_>>();
    rows(&ids).reshape((30, 16)).expect("rows")
}

/// Fails unless the bits of `got`, `[.., tokens, vocabulary]`, are those of `expected`.
#[track_caller]
fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    let [got, expected] = [got, expected].map(|x| bits(&x.flatten_all().expect("flat")));
    let apart = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    assert!(
        got.len() == expected.len() && apart == 0,
        "{what}: {apart} of {} apart",
        expected.len()
    );
}

/// The logits of one sequence, `[tokens, vocabulary]`, as the trainer's forward pass gives them.
fn whole(model: &Llama, ids: &[u32]) -> Tensor {
    let logits = model.forward(&rows(ids)).expect("logits");
    logits.squeeze(0).expect("one row").detach()
}

/// Generates along `ids` in the ways that generation and serving do, and compares.
fn check(name: &str, model: &Llama) -> Outcome {
    let sequences = [40, 1, 33, 17, 40].into_iter().enumerate();
    let sequences: Vec<Vec<u32>> = sequences.map(|(i, count)| tokens(i, count)).collect();
    let expected: Vec<Tensor> = sequences.iter().map(|ids| whole(model, ids)).collect();

    // The others are tested beside each other below.
    for (ids, expected) in sequences.iter().zip(&expected).take(3) {
        for parts in [vec![1; ids.len()], vec![9, 1, 2, 20, 1, 1, 40]] {
            let mut cache = model.new_cache(1, ids.len())?;
            let mut logits = vec![];
            for part in parts {
                let part = part.min(ids.len() - cache.len());
                let ids = &ids[cache.len()..][..part];
                if part > 0 {
                    logits.push(model.forward_cached(&rows(ids), &mut cache)?);
                }
            }
            let logits = Tensor::cat(&logits, 1)?;
            assert_same(&logits, expected, &format!("{name}, over a cache"));
        }
        let mut cache = model.new_cache(1, ids.len())?;
        let last = model.last_logits(&rows(ids), &mut cache)?;
        let expected = expected.narrow(0, ids.len() - 1, 1)?;
        assert_same(&last, &expected, &format!("{name}, the prompt at once"));
    }

    // Beside each other: sequences begin at different steps and end where their tokens do.
    let mut caches = (0..sequences.len())
        .map(|_| model.new_cache(1, 50))
        .collect::<Result<Vec<_>, _>>()?;
    for step in 0..60 {
        let token = |i: usize| -> Option<(u32, usize)> {
            let place = usize::checked_sub(step, 5 * i)?;
            Some((*sequences[i].get(place)?, place))
        };
        let running: Vec<usize> = (0..sequences.len())
            .filter(|&i| token(i).is_some())
            .collect();
        if running.is_empty() {
            continue;
        }
        let ids: Vec<u32> = running.iter().filter_map(|&i| Some(token(i)?.0)).collect();
        let caches = caches.iter_mut().enumerate();
        let caches = caches
            .filter(|(i, _)| running.contains(i))
            .map(|(_, cache)| cache);
        let logits = model.step(&ids, &mut caches.collect::<Vec<_>>())?;
        for (row, &i) in running.iter().enumerate() {
            let (_, place) = token(i).expect("it runs");
            let expected = expected[i].narrow(0, place, 1)?;
            assert_same(
                &logits.narrow(0, row, 1)?,
                &expected,
                &format!("{name}, together"),
            );
        }
    }

    // As batches train: rows beside each other, and packed documents.
    let two = [sequences[0].clone(), sequences[4].clone()].concat();
    let batch = Tensor::from_slice(&two, (2, 40), &Device::Cpu)?;
    let both = Tensor::stack(&[&expected[0], &expected[4]], 0)?;
    assert_same(&model.forward(&batch)?, &both, &format!("{name}, a batch"));
    let packed = sequences.concat();
    let documents: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let features = model.features(&rows(&packed), std::slice::from_ref(&documents))?;
    let mut start = 0;
    for (ids, expected) in sequences.iter().zip(&expected) {
        // The loss of one place is the log-probability of its target.
        for (place, target) in ids.iter().skip(1).enumerate().step_by(7) {
            let loss = model.loss(&features, &[(start + place) as u32], &[*target])?;
            let target = Tensor::from_slice(&[*target], 1, &Device::Cpu)?;
            let log_probability = cross_entropy(&expected.narrow(0, place, 1)?, &target)?;
            assert_same(&loss, &log_probability, &format!("{name}, the loss"));
        }
        start += ids.len();
    }
    Ok(())
}

/// The families of the golden file that generate.
fn language_models() -> Vec<String> {
    let mut families: Vec<String> = configs().into_keys().collect();
    families.retain(|family| family != "bert");
    assert!(families.len() >= 12, "{families:?}");
    families
}

fn opened(dir: &Path, dtype: DType) -> Llama {
    match models::open(dir, &ModelOptions::new().with_dtype(dtype)).expect("a model") {
        Model::Llama(model) => model,
        _ => panic!("{} has no language model", dir.display()),
    }
}

/// In high precision, from a file and as variables that train: the two agree as well.
#[test]
fn every_family_in_high_precision() -> Outcome {
    for family in language_models() {
        let dir = tempfile::tempdir()?;
        write_model(&family, dir.path());
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut model = opened(dir.path(), dtype);
            check(&format!("{family} in {dtype:?}"), &model)?;
            let trained = TrainableModel::open(dir.path(), dtype, &Device::Cpu)?.model;
            let trained = trained.llama().expect("a language model");
            let ids = tokens(3, 40);
            let (logits, served) = (whole(trained, &ids), whole(&model, &ids));
            assert_same(&logits, &served, &format!("{family}: trained and served"));
            if dtype != DType::F16 {
                check(&format!("{family} in {dtype:?}, to train"), trained)?;
            }
            if dtype == DType::F32 {
                model.set_operands(Some(DType::BF16));
                check(&format!("{family}, operands in bf16"), &model)?;
            }
        }
    }
    Ok(())
}

/// Layers whose inputs do not fill the scheme's groups stay in high precision.
fn quantize(source: &Checkpoint, target: &Path, options: &QuantizeOptions) -> Outcome {
    let mut unfit = vec![];
    loop {
        let options = options.clone().with_ignore(unfit.clone());
        match rewrite::quantize(source, target, &options, &mut rewrite::quiet) {
            Err(FilesError::NotExportable { path, .. }) if !unfit.contains(&path) => {
                unfit.push(path)
            }
            report => {
                assert!(!report?.quantized.is_empty());
                return Ok(());
            }
        }
    }
}

/// With codes of weights, whose inputs have one scale for all time, one for each token, for each group of a token, or none.
#[test]
fn every_family_in_fp8() -> Outcome {
    let weights = Scheme::WeightOnly {
        granularity: fp8_core::Granularity::Rowwise,
    };
    let schemes = [
        Scheme::StaticTensor,
        Scheme::ChannelToken,
        Scheme::TensorToken,
        Scheme::Mxfp8,
        weights,
    ];
    for family in language_models() {
        let dir = tempfile::tempdir()?;
        write_model(&family, dir.path());
        let plain = opened(dir.path(), DType::F32);
        let amaxes = rewrite::input_amaxes(&plain, || {
            plain.forward(&many()).expect("logits");
            Ok(())
        })?;
        for scheme in schemes {
            let target = dir.path().join(scheme.to_string().replace(':', "_"));
            let source = Checkpoint::open_dir(dir.path())?;
            let options = QuantizeOptions::new(scheme).with_input_amaxes(amaxes.clone());
            quantize(&source, &target, &options)?;
            let model = opened(&target, DType::F32);
            check(&format!("{family}, {scheme}"), &model)?;
        }
    }
    Ok(())
}

/// Layers that a guard casts, by scales that an earlier step has made or one for each token.
#[test]
fn under_a_guard_with_frozen_scales_and_with_scales_of_tokens() -> Outcome {
    for family in ["llama", "mistral", "qwen3_moe", "deepseek_v3"] {
        for name in ["delayed", "rowwise"] {
            let dir = tempfile::tempdir()?;
            write_model(family, dir.path());
            let model = TrainableModel::open(dir.path(), DType::F32, &Device::Cpu)?.model;
            let model = model.llama().expect("a language model");
            fp8::prepare_fp8(model, &Default::default())?;
            let recipe: Recipe = name.parse()?;
            let ids = many();
            let step = || -> fp8::Result<Tensor> { Ok(model.forward(&ids).expect("logits")) };
            let high = step()?;
            let first = with_fp8(recipe.clone(), step)?;
            assert_ne!(bits(&first), bits(&high), "it is FP8");
            let guard = fp8_autocast(Autocast::new(recipe).training(false))?;
            check(&format!("{family}, {name}"), model)?;
            guard.close()?;
        }
    }
    Ok(())
}

/// Adds an adapter with random matrices to the linear layers and makes it the active one.
fn adapt(model: &mut Model) -> Outcome {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let config = AdapterConfig::new(2).with_targets(Targets::AllLinear);
    model.add_adapter("random", &config, vb)?;
    let vars = vars.data().lock().expect("the variables");
    for (i, var) in vars.values().enumerate() {
        var.set(&(normal(i as u64, var.dims()).to_device(&Device::Cpu)? * 0.1)?)?;
    }
    Ok(())
}

#[test]
fn with_an_active_adapter_on_high_precision_and_on_fp8() -> Outcome {
    for family in ["llama", "mistral", "qwen3"] {
        let dir = tempfile::tempdir()?;
        write_model(family, dir.path());
        let target = dir.path().join("fp8");
        let source = Checkpoint::open_dir(dir.path())?;
        quantize(
            &source,
            &target,
            &QuantizeOptions::new(Scheme::ChannelToken),
        )?;
        for dir in [dir.path(), &*target] {
            let mut model = models::open(dir, &ModelOptions::new().with_dtype(DType::F32))?;
            let ids = tokens(3, 40);
            let base = whole(model.llama().expect("a language model"), &ids);
            adapt(&mut model)?;
            let model = model.llama().expect("a language model");
            assert_ne!(bits(&whole(model, &ids)), bits(&base), "it has an effect");
            check(&format!("{family} with an adapter"), model)?;
        }
    }
    Ok(())
}
