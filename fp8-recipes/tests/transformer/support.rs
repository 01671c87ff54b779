//! A layer in both forms, and all that a step computes.

use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::Recipe;
use fp8_recipes::nn::{LayerInputs, TransformerConfig, TransformerLayer, transformer_layer};
use fp8_recipes::{
    Autocast, Fp8Module, PrepareOptions, StepSummary, end_step, fp8_autocast, prepare_fp8,
};
use fp8_test_support::{assert_same, device, flat64, normal};
use std::collections::BTreeMap;

pub const BATCH: usize = 2;
pub const TOKENS: usize = 16;
pub const HIDDEN: usize = 64;
pub const HEADS: usize = 4;

/// The recipes that every form goes through.
pub const RECIPES: [&str; 7] = [
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "delayed",
    "current",
    "blockwise",
    "mxfp8",
];

/// Sizes at which every recipe converts every layer.
pub fn config() -> TransformerConfig {
    TransformerConfig::new(HIDDEN, HEADS)
        .with_intermediate_size(128)
        .with_causal(true)
}

/// A layer and its variables.
pub struct Model {
    pub vars: VarMap,
    pub layer: TransformerLayer,
    /// Whether its backward pass is [`fp8_recipes::backward`].
    pub collects: bool,
}

impl Model {
    pub fn new(config: &TransformerConfig, single: bool, dtype: DType) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &device());
        transformer_layer(config, vb.pp("layer")).unwrap();
        for (name, var) in vars.data().lock().unwrap().iter() {
            let seed = name
                .bytes()
                .fold(7, |hash, b| hash * 31 % 9973 + u64::from(b));
            // Norms' weights stay near 1.
            let offset = f64::from(u8::from(name.contains("layernorm.weight")));
            let value = normal(seed, var.dims()).affine(0.15, offset).unwrap();
            var.set(&value.to_dtype(dtype).unwrap()).unwrap();
        }
        let vb = VarBuilder::from_varmap(&vars, dtype, &device());
        let layer = transformer_layer(config, vb.pp("layer")).unwrap();
        Self {
            vars,
            layer: layer.with_single_node(single),
            collects: false,
        }
    }

    /// With FP8 state.
    pub fn prepared(config: &TransformerConfig, single: bool, dtype: DType) -> Self {
        let model = Self::new(config, single, dtype);
        model.prepare(&PrepareOptions::default());
        model
    }

    pub fn prepare(&self, options: &PrepareOptions) {
        let report = prepare_fp8(&self.layer, options).unwrap();
        assert_eq!(report.skipped(), 0, "{report}");
    }

    /// The variables by name.
    pub fn named(&self) -> BTreeMap<String, Var> {
        let vars = self.vars.data().lock().unwrap();
        vars.iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    }

    /// One training step.
    pub fn step(&self, x: &Tensor, inputs: &LayerInputs<'_>, recipe: Option<&str>) -> Step {
        let autocast = recipe.map(|name| Autocast::new(name.parse::<Recipe>().unwrap()));
        self.step_in(x, inputs, autocast)
    }

    pub fn step_in(
        &self,
        x: &Tensor,
        inputs: &LayerInputs<'_>,
        autocast: Option<Autocast>,
    ) -> Step {
        let x = Var::from_tensor(x).unwrap();
        let guard = autocast.map(|autocast| fp8_autocast(autocast).unwrap());
        let y = self.layer.forward(&x, inputs).unwrap();
        let step = self.backward(&x, y);
        let summary = guard.map(|guard| guard.close().unwrap());
        end_step().unwrap();
        Step { summary, ..step }
    }

    /// The gradients that flow from `y`.
    pub fn backward(&self, x: &Tensor, y: Tensor) -> Step {
        let loss = normal(77, y.dims()).to_dtype(y.dtype()).unwrap();
        let loss = (&y * loss).unwrap().sum_all().unwrap();
        let grads = match self.collects {
            true => fp8_recipes::backward(&loss).unwrap(),
            false => loss.backward().unwrap(),
        };
        let mut all = BTreeMap::from([("y".to_string(), y)]);
        all.extend(grads.get(x).map(|grad| ("x".to_string(), grad.clone())));
        for (name, var) in self.named() {
            all.extend(grads.get(&var).map(|grad| (name, grad.clone())));
        }
        Step { all, summary: None }
    }
}

impl Fp8Module for Model {
    fn visit(&self, visitor: &mut dyn fp8_recipes::Visitor) {
        self.layer.visit(visitor);
    }
}

/// The result of a step, `y`, the gradient of x, `x`, and those of the variables by their names.
pub struct Step {
    pub all: BTreeMap<String, Tensor>,
    pub summary: Option<StepSummary>,
}

/// An input of the layer.
pub fn input(dtype: DType) -> Tensor {
    let x = normal(5, (BATCH, TOKENS, HIDDEN));
    x.to_dtype(dtype).unwrap()
}

/// cos and sin of the first tokens.
pub fn angles(tokens: usize, head_dim: usize) -> (Tensor, Tensor) {
    let half = head_dim / 2;
    let values: Vec<f32> = (0..tokens * half)
        .map(|i| (i / half) as f32 * 0.9f32.powi((i % half) as i32))
        .collect();
    let angles = Tensor::from_vec(values, (tokens, half), &device()).unwrap();
    (angles.cos().unwrap(), angles.sin().unwrap())
}

/// Fails unless all of both steps is the same: to the bit, but for the tensors `sums` names, which may differ by `tolerance` of
/// the norm of all their elements. Those are the gradients that flow through the sum of the three gradients of the common input
/// of q, k and v, which the forms add in another order: an error of a few roundings of the dtype.
#[track_caller]
pub fn assert_steps(case: &str, got: &Step, want: &Step, sums: &[&str], tolerance: f64) {
    let names = |step: &Step| step.all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(got), names(want), "{case}");
    for (name, want) in &want.all {
        let (case, got) = (format!("{case}: {name}"), &got.all[name]);
        if !sums.iter().any(|sum| name.contains(sum)) {
            assert_same(&case, got, want);
            continue;
        }
        assert_eq!(got.dims(), want.dims(), "{case}");
        let (got, want) = (flat64(got), flat64(want));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        let size = norm(&mut want.iter().copied());
        assert!(size > 0., "{case}: all zeros");
        assert!(error <= tolerance * size, "{case}: {:e}", error / size);
    }
}

/// How far a gradient that is a sum may differ between the forms: the roundings of two additions and of what follows them.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 8. * 2f64.powi(-9),
        _ => 8. * 2f64.powi(-24),
    }
}
