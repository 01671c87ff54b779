//! The same training with and without checkpoints, and all that can be seen of it.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::Operand;
use fp8_recipes::nn::{self, LayerInputs, TransformerConfig, TransformerLayer, checkpoint};
use fp8_recipes::{
    CastObserver, Fp8Layer, Fp8Module, PrepareOptions, Result, Visitor, prepare_fp8,
};
pub use fp8_test_support::{bits, cpu_tensor as tensor, named};
use std::sync::{Arc, Mutex};

pub const CPU: &Device = &Device::Cpu;
const HIDDEN: usize = 32;

/// What is checkpointed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cut {
    Nowhere,
    /// Each layer.
    Layers,
    /// Both layers in one checkpoint, with one around the second.
    Nested,
}

/// Two layers, the first as one node of the graph, and an output.
#[derive(Clone, Fp8Module)]
pub struct Model {
    first: TransformerLayer,
    second: TransformerLayer,
    head: nn::Linear,
}

pub struct Training {
    pub model: Model,
    pub vars: Vec<(String, Var)>,
    pub cut: Cut,
    events: Arc<Mutex<Vec<String>>>,
}

impl Training {
    pub fn new(cut: Cut) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU);
        let config = TransformerConfig::new(HIDDEN, 2)
            .with_causal(true)
            .with_hidden_dropout(0.1);
        let second = nn::transformer_layer(&config, vb.pp("second")).unwrap();
        let model = Model {
            first: nn::transformer_layer(&config, vb.pp("first")).unwrap(),
            second: second.with_single_node(false),
            head: nn::linear(HIDDEN, 16, vb.pp("head")).unwrap(),
        };
        let options = PrepareOptions::default().with_operators(true);
        prepare_fp8(&model, &options).unwrap();
        let vars = named(&vars);
        for (i, (_, var)) in vars.iter().enumerate() {
            let noise = (tensor(i as u64, var.dims()) * 0.3).unwrap();
            var.set(&(noise + 0.1).unwrap()).unwrap();
        }
        Self {
            model,
            vars,
            cut,
            events: Arc::default(),
        }
    }

    /// An observer of all casts, which are compared too.
    pub fn observer(&self) -> CastObserver {
        let events = self.events.clone();
        CastObserver::new(move |event| {
            let codes = event.quantized.codes().flatten_all().unwrap();
            let sum: u64 = codes
                .to_vec1::<u8>()
                .unwrap()
                .iter()
                .map(|&c| u64::from(c))
                .sum();
            let text = format!("{} {} {:?} {sum}", event.path, event.operand, event.cast);
            events.lock().unwrap().push(text);
        })
    }

    /// `[2, 8, 16]`
    pub fn forward(&self, x: &Tensor, seed: u64) -> Result<Tensor> {
        let run = move |layer: &TransformerLayer, x: &Tensor| {
            layer.forward(x, &LayerInputs::default().with_dropout_seed(seed))
        };
        let (first, second) = (self.model.first.clone(), self.model.second.clone());
        let y = match self.cut {
            Cut::Nowhere => run(&second, &run(&first, x)?)?,
            Cut::Layers => {
                let y = checkpoint(move |x| run(&first, x), x)?;
                checkpoint(move |x| run(&second, x), &y)?
            }
            Cut::Nested => checkpoint(
                move |x| {
                    let second = second.clone();
                    checkpoint(move |x| run(&second, x), &run(&first, x)?)
                },
                x,
            )?,
        };
        self.model.head.try_forward(&y)
    }

    pub fn loss(&self, x: &Tensor, seed: u64) -> Result<Tensor> {
        Ok(self.forward(x, seed)?.sqr()?.mean_all()?)
    }

    /// Plain gradient descent; gives the bits of the gradients.
    pub fn step(&self, grads: &GradStore) -> Vec<(String, Vec<u32>)> {
        let mut seen = vec![];
        for (name, var) in &self.vars {
            let grad = grads
                .get(var)
                .unwrap_or_else(|| panic!("{name}: no gradient"));
            var.set(&(var.as_tensor() - (grad * 0.05).unwrap()).unwrap())
                .unwrap();
            seen.push((name.clone(), bits(grad)));
        }
        seen
    }

    /// State, counts and casts so far.
    pub fn trace(&self) -> String {
        struct States(String);
        impl Visitor for States {
            fn layer(&mut self, layer: &dyn Fp8Layer) {
                let Some(state) = layer.fp8_state() else {
                    return;
                };
                if self.0.is_empty() {
                    for (name, row) in state.table().save().unwrap() {
                        self.0 += &format!("{name} {row:?}\n");
                    }
                }
                let operands = [
                    Operand::Input,
                    Operand::Weight,
                    Operand::GradOutput,
                    Operand::WeightForGradInput,
                    Operand::InputForGradWeight,
                    Operand::Output,
                    Operand::GradInput,
                ];
                let counts = operands.map(|operand| state.casts(operand));
                self.0 += &format!("{} {counts:?} {:?}\n", state.path(), state.calibration());
            }

            fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
        }
        let mut states = States(String::new());
        self.model.visit(&mut states);
        assert!(!states.0.is_empty());
        let mut events = self.events.lock().unwrap().clone();
        // Within a layer their order is the same; between layers nothing is promised.
        events.sort();
        states.0 + &events.join("\n")
    }
}
