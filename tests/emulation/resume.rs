//! Stochastic rounding over threads and resumed runs.

use crate::table::{Net, ids};
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{PrepareOptions, RecipeName, fp8_autocast, prepare_fp8};
use std::path::Path;

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
        for (name, var) in vars.data().lock().unwrap().iter() {
            let seed = name
                .bytes()
                .fold(7u32, |seed, byte| seed.wrapping_mul(31) + u32::from(byte));
            let noise: Vec<f32> = (0..var.elem_count() as u32)
                .map(|i| {
                    let bits = (i ^ seed).wrapping_mul(2654435761);
                    (bits >> 8) as f32 / (1 << 24) as f32 - 0.5
                })
                .collect();
            var.set(&Tensor::from_vec(noise, var.shape(), &Device::Cpu).unwrap())
                .unwrap();
        }
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
        let values = vars["up.weight"]
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    fn step(&mut self) -> Vec<u32> {
        let guard = fp8_autocast(RecipeName::Direct).unwrap();
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

    // The bits matter: the same weights with other draws give other losses.
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

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let weights = |threads: usize| -> Vec<Vec<u32>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut run = Run::new();
        let step = |run: &mut Run| {
            let guard = fp8_autocast(RecipeName::Direct).unwrap();
            let handle = guard.handle();
            let loss = pool
                .install(|| handle.run(|| run.net.loss(&ids()).unwrap()))
                .unwrap();
            guard.close().unwrap();
            let grads = pool.install(|| loss.backward()).unwrap();
            let report = run.optimizer.apply(&grads).unwrap();
            assert!(!report.skipped().unwrap());
            run.weight()
        };
        (0..4).map(|_| step(&mut run)).collect()
    };
    assert_eq!(weights(1), weights(2));
    assert_eq!(weights(1), weights(3));
}
