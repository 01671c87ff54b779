//! A training checkpoint, resumed in a small model.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, fp8_state, resume_training, save_training};
use fp8::config::Recipe;
use fp8::nn::{self, Linear};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{DelayedScaling, fp8_autocast, prepare_fp8};
use std::collections::BTreeMap;

struct Run {
    vars: VarMap,
    model: Linear,
    optimizer: AdamW,
    recipe: Recipe,
}

impl Run {
    fn new() -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let hint = candle_nn::Init::Const(0.5);
        vb.get_with_hints((2, 3), "fc.weight", hint).unwrap();
        let model = nn::linear_no_bias(3, 2, vb.pp("fc")).unwrap();
        prepare_fp8(&model, &Default::default()).unwrap();
        let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        Self {
            vars,
            model,
            optimizer,
            recipe: DelayedScaling::default().with_amax_history_len(2).into(),
        }
    }

    fn step(&mut self) {
        let guard = fp8_autocast(self.recipe.clone()).unwrap();
        let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
        let y = self.model.forward(&x).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        // A step is skipped if a variable in the checkpoint was not finite, which is allowed.
        self.optimizer.apply(&grads).unwrap();
    }

    /// The bits of everything that a checkpoint may change.
    fn everything(&self) -> BTreeMap<String, Vec<u32>> {
        let bits = |tensor: &Tensor| -> Vec<u32> {
            let tensor = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
            let values = tensor.to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        let mut all = BTreeMap::new();
        for (name, var) in self.vars.data().lock().unwrap().iter() {
            all.insert(name.clone(), bits(var.as_tensor()));
        }
        let state = fp8_state(&self.model).unwrap();
        let moments = self.optimizer.state().unwrap();
        for (name, row) in state {
            let own = |column: &str| format!("{name}.{column}");
            let history = row.amax_history.iter().map(|amax| amax.to_bits());
            all.insert(own("amax_history"), history.collect());
            all.insert(own("quant_scale"), vec![row.quant_scale.to_bits()]);
            all.insert(own("dequant_scale"), vec![row.dequant_scale.to_bits()]);
            let calibrated = row.calibrated_amax.map(f32::to_bits);
            all.insert(own("calibrated_amax"), calibrated.into_iter().collect());
            all.insert(
                own("counts"),
                [
                    vec![row.non_finite, row.id],
                    row.draws.values().copied().collect(),
                ]
                .concat(),
            );
        }
        all.extend(
            moments
                .iter()
                .map(|(name, tensor)| (name.clone(), bits(tensor))),
        );
        all
    }
}

pub fn run(data: &[u8]) {
    let path = super::scratch().join("checkpoint.safetensors");
    std::fs::write(&path, data).unwrap();
    let mut run = Run::new();
    let before = run.everything();
    let recipe = run.recipe.clone();
    match resume_training(
        &path,
        &run.model,
        &run.vars,
        &mut run.optimizer,
        Some(&recipe),
    ) {
        Err(error) => assert_eq!(run.everything(), before, "changed in spite of: {error}"),
        Ok(_) => {
            for (name, bits) in run.everything() {
                let values = bits.into_iter().map(f32::from_bits);
                let fits: fn(f32) -> bool = match name.rsplit('.').next() {
                    Some("quant_scale") => |x| x.is_normal() && x > 0.,
                    Some("amax_history" | "calibrated_amax" | "exp_avg_sq") => {
                        |x| x.is_finite() && x >= 0.
                    }
                    Some("exp_avg") => f32::is_finite,
                    _ => |_| true,
                };
                assert!(values.into_iter().all(fits), "{name}");
            }
            run.step();
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut run = Run::new();
    let mut seeds = vec![];
    for step in 0..3 {
        let meta = TrainingMeta {
            step,
            recipe: Some(run.recipe.clone()),
            random: serde_json::json!({"seed": 1}),
            extra: serde_json::Value::Null,
        };
        let path = super::scratch().join("seed.safetensors");
        save_training(&path, &run.model, &run.vars, &run.optimizer, &meta).unwrap();
        seeds.push(std::fs::read(path).unwrap());
        run.step();
    }
    seeds
}
