//! Stochastic rounding over threads and resumed runs.

use crate::table::{Net, ids};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8::config::{CastConfig, CastRounding, Fp8LinearConfig, Operand};
use fp8::fp8_core::Format;
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{
    Autocast, CastEvent, CastObserver, PrepareOptions, Recipe, RecipeName, fp8_autocast, nn,
    prepare_fp8,
};
use fp8_test_support::{bits, cpu_tensor, fill};
use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

struct Run {
    vars: VarMap,
    net: Net,
    optimizer: AdamW,
}

impl Run {
    /// The same weights each time.
    fn new() -> Self {
        let vars = VarMap::new();
        let net = Net::new(&vars).unwrap();
        fill(&vars, 7);
        prepare_fp8(&net, &PrepareOptions::default().with_operators(true)).unwrap();
        let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        Self {
            vars,
            net,
            optimizer,
        }
    }

    /// The bits of a weight: forward casts hide small differences from the loss.
    fn weight(&self) -> Vec<u32> {
        let vars = self.vars.data().lock().unwrap();
        bits(&vars["up.weight"])
    }

    fn step(&mut self) -> Vec<u32> {
        self.step_by(&RecipeName::Direct.into())
    }

    fn step_by(&mut self, recipe: &Recipe) -> Vec<u32> {
        let guard = fp8_autocast(recipe.clone()).unwrap();
        let loss = self.net.loss(&ids()).unwrap();
        guard.close().unwrap();
        let report = self.optimizer.apply(&loss.backward().unwrap()).unwrap();
        assert!(!report.skipped().unwrap());
        self.weight()
    }

    fn save(&self, path: &Path, step: u64) {
        let meta = TrainingMeta {
            step,
            recipe: Some(RecipeName::Direct.into()),
            random: serde_json::Value::Null,
            extra: serde_json::Value::Null,
        };
        save_training(path, &self.net, &self.vars, &self.optimizer, &meta).unwrap();
    }
}

#[test]
fn a_resumed_run_draws_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let mut run = Run::new();
    run.step();
    run.step();
    run.save(&path, 2);
    let rest: Vec<_> = (0..3).map(|_| run.step()).collect();

    let mut again = Run::new();
    let recipe = RecipeName::Direct.into();
    resume_training(
        &path,
        &again.net,
        &again.vars,
        &mut again.optimizer,
        Some(&recipe),
    )
    .unwrap();
    assert_eq!((0..3).map(|_| again.step()).collect::<Vec<_>>(), rest);

    // Random bits matter: the same weights with other draws give other losses.
    let mut other = Run::new();
    resume_training(
        &path,
        &other.net,
        &other.vars,
        &mut other.optimizer,
        Some(&recipe),
    )
    .unwrap();
    fp8_autocast(RecipeName::Direct).unwrap().close().unwrap();
    let guard = fp8_autocast(RecipeName::Direct).unwrap();
    other.net.loss(&ids()).unwrap().backward().unwrap();
    guard.close().unwrap();
    assert_ne!((0..3).map(|_| other.step()).collect::<Vec<_>>(), rest);
}

/// Every operand and result of a linear layer rounded stochastically, without scales.
fn stochastic_everywhere() -> Recipe {
    let cast = |format| {
        CastConfig::unscaled()
            .with_format(format)
            .with_rounding(CastRounding::Stochastic)
    };
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Direct)
        .with_input(cast(Format::E4M3))
        .with_weight(cast(Format::E4M3))
        .with_output(cast(Format::E5M2));
    config.into()
}

#[test]
fn evaluation_and_resuming_move_no_draws() {
    let recipe = stochastic_everywhere();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let evaluate = |run: &Run| {
        let guard = fp8_autocast(Autocast::new(recipe.clone()).training(false)).unwrap();
        let loss = run.net.loss(&ids()).unwrap().to_scalar::<f32>().unwrap();
        guard.close().unwrap();
        loss.to_bits()
    };
    let steps = |run: &mut Run, evaluations: usize| -> Vec<Vec<u32>> {
        let step = |run: &mut Run| {
            let step = run.step_by(&recipe);
            let losses: Vec<_> = (0..evaluations).map(|_| evaluate(run)).collect();
            assert!(losses.windows(2).all(|two| two[0] == two[1]));
            step
        };
        (0..2).map(|_| step(run)).collect()
    };

    let mut plain = Run::new();
    let mut first = steps(&mut plain, 0);
    first.extend(steps(&mut plain, 0));
    let mut validated = Run::new();
    let mut second = steps(&mut validated, 2);
    validated.save(&path, 2);
    second.extend(steps(&mut validated, 1));
    assert_eq!(first, second);

    // Resumed with an empty cache of weights, where the saved run had the codes from its evaluation.
    let mut resumed = Run::new();
    resume_training(
        &path,
        &resumed.net,
        &resumed.vars,
        &mut resumed.optimizer,
        Some(&RecipeName::Direct.into()),
    )
    .unwrap();
    assert_eq!(steps(&mut resumed, 0), first[2..]);
    // Every step draws other bits.
    let weights: HashSet<_> = first.iter().collect();
    assert_eq!(weights.len(), 4);
}

#[test]
fn a_weight_keeps_its_codes_until_it_changes() {
    let recipe = stochastic_everywhere();
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = nn::linear_no_bias(64, 64, vb.pp("fc")).unwrap();
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let codes = |times: usize| -> Vec<Vec<u8>> {
        let seen = Arc::new(Mutex::new(vec![]));
        let keep = seen.clone();
        let observer = CastObserver::new(move |event: &CastEvent<'_>| {
            if event.operand == Operand::Weight {
                let codes = event.quantized.codes().flatten_all().unwrap();
                keep.lock().unwrap().push(codes.to_vec1::<u8>().unwrap());
            }
        });
        let autocast = Autocast::new(recipe.clone()).with_cast_observer(&observer);
        let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu).unwrap();
        for _ in 0..times {
            // Other codes of the same weight evict these from the cache.
            for format in [
                RecipeName::Tensorwise,
                RecipeName::Rowwise,
                RecipeName::Mxfp8,
            ] {
                let guard = fp8_autocast(format).unwrap();
                layer.forward(&x).unwrap();
                guard.close().unwrap();
            }
            for name in [RecipeName::Direct, RecipeName::Current] {
                let guard = fp8_autocast(name).unwrap();
                layer.forward(&x).unwrap();
                guard.close().unwrap();
            }
            let guard = fp8_autocast(autocast.clone()).unwrap();
            layer.forward(&x).unwrap();
            guard.close().unwrap();
        }
        let seen = seen.lock().unwrap();
        seen.clone()
    };
    let first = codes(3);
    assert!(first.len() > 1, "the cache kept the codes");
    assert!(first.windows(2).all(|two| two[0] == two[1]));
    let var = vars.all_vars().remove(0);
    var.set(&(var.as_tensor() * 1.0001).unwrap()).unwrap();
    assert_ne!(codes(1)[0], first[0]);
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    // Larger than the parts that threads take, with a number of columns that is not a multiple of four, the words of a block.
    const ROWS: usize = 700;
    const COLS: usize = 203;
    let grads = |threads: usize| -> Vec<Vec<u32>> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let net = [
            nn::linear(64, COLS, vb.pp("up")).unwrap(),
            nn::linear(COLS, 61, vb.pp("down")).unwrap(),
        ];
        fill(&vars, 7);
        for layer in &net {
            prepare_fp8(layer, &PrepareOptions::default()).unwrap();
        }
        let x = cpu_tensor(5, &[ROWS, 64]);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut found = vec![];
        for _ in 0..2 {
            let guard = fp8_autocast(stochastic_everywhere()).unwrap();
            let handle = guard.handle();
            let forward = || net[1].forward(&net[0].forward(&x)?)?.sqr()?.mean_all();
            let loss = pool.install(|| handle.run(|| forward().unwrap())).unwrap();
            guard.close().unwrap();
            let grads = pool.install(|| loss.backward()).unwrap();
            let data = vars.data().lock().unwrap();
            for name in ["up.weight", "up.bias", "down.weight", "down.bias"] {
                found.push(bits(grads.get(&data[name]).unwrap()));
            }
        }
        found
    };
    let one = grads(1);
    assert_eq!(one, grads(2));
    assert_eq!(one, grads(3));
    assert_ne!(one[..4], one[4..], "the second step draws other bits");
}
