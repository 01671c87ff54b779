//! Every cast of a training step, as a table.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{Fp8LinearConfig, Operand, SkipReason};
use fp8::fp8_core::{Format, Overflow, Rounding};
use fp8::nn::{self, Add, Div, Embedding, LayerNorm, Linear, Matmul, Mul, RmsNorm};
use fp8::{
    Autocast, CAST_TENSORS, CastObserver, Fp8Module, Outcome, PrepareOptions, Recipe, RecipeName,
    fp8_autocast, prepare_fp8,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// One of each operator except convolutions; a plain and a batched product.
#[derive(Fp8Module)]
pub struct Net {
    words: Embedding,
    norm: LayerNorm,
    up: Linear,
    scores: Matmul,
    batched: Matmul,
    rms: RmsNorm,
    ratio: Div,
    gate: Mul,
    residual: Add,
    head: Linear,
}

pub const SIZE: usize = 16;

impl Net {
    pub fn new(vars: &VarMap) -> Result<Self> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
        Ok(Self {
            words: nn::embedding(10, SIZE, vb.pp("words"))?,
            norm: nn::layer_norm(SIZE, 1e-5, vb.pp("norm"))?,
            up: nn::linear(SIZE, SIZE, vb.pp("up"))?,
            scores: Matmul::new("scores"),
            batched: Matmul::new("batched"),
            rms: nn::rms_norm(SIZE, 1e-5, vb.pp("rms"))?,
            ratio: Div::new("ratio"),
            gate: Mul::new("gate"),
            residual: Add::new("residual"),
            head: nn::linear_no_bias(SIZE, 3, vb.pp("head"))?,
        })
    }

    pub fn loss(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.words.forward(ids)?;
        let y = self.up.forward(&self.norm.forward(&x)?)?;
        let y = self.scores.forward(&y, &y.t()?)?;
        let y = self.batched.forward(&y.unsqueeze(0)?, &x.unsqueeze(0)?)?;
        let y = self.rms.forward(&y.squeeze(0)?)?;
        let y = self.ratio.forward(&y, &(x.sqr()? + 1.)?)?;
        let y = self
            .residual
            .forward(&x, &self.gate.forward(&y.narrow(1, 0, SIZE)?, &x)?)?;
        self.head.forward(&y)?.sqr()?.mean_all()
    }
}

pub fn ids() -> Tensor {
    let ids: Vec<u32> = (0..SIZE as u32).map(|i| i * 7 % 10).collect();
    Tensor::new(ids, &Device::Cpu).unwrap()
}

/// (layer, tensor) to how often it was cast, and how.
type Casts = BTreeMap<(String, &'static str), (usize, Format, &'static str, Overflow)>;

fn observed(recipe: impl Into<Recipe>, options: PrepareOptions) -> Casts {
    let vars = VarMap::new();
    let net = Net::new(&vars).unwrap();
    let report = prepare_fp8(&net, &options).unwrap();
    assert!(report.unmatched.is_empty());
    let casts = Arc::new(Mutex::new(Casts::new()));
    let list = casts.clone();
    let observer = CastObserver::new(move |event| {
        let rounding = match event.cast.rounding {
            Rounding::NearestEven => "nearest",
            Rounding::Stochastic(_) => "stochastic",
            _ => "other",
        };
        let key = (event.path.to_string(), event.operand.name());
        let mut list = list.lock().unwrap();
        let entry = (0, event.cast.format, rounding, event.cast.overflow);
        list.entry(key).or_insert(entry).0 += 1;
    });
    let guard = fp8_autocast(Autocast::new(recipe).with_cast_observer(&observer)).unwrap();
    let loss = net.loss(&ids()).unwrap();
    guard.close().unwrap();
    loss.backward().unwrap();
    let casts = casts.lock().unwrap();
    casts.clone()
}

/// What section 8 of the toolkit's paper, and its code, prescribe for the net above.
fn expected(forward: (Format, Overflow)) -> Casts {
    let mut casts = Casts::new();
    let mut add = |layer: &str, inputs: usize, weight: bool, output: bool, first: bool| {
        let mut note = |operand: Operand, count: usize, backward: bool| {
            let (format, rounding, overflow) = match backward {
                true => (Format::E5M2, "stochastic", Overflow::NonFinite),
                false => (forward.0, "nearest", forward.1),
            };
            if count > 0 {
                let key = (layer.to_string(), operand.name());
                casts.insert(key, (count, format, rounding, overflow));
            }
        };
        note(Operand::Input, inputs, false);
        note(Operand::GradInput, if first { 0 } else { inputs }, true);
        note(Operand::Weight, usize::from(weight), false);
        note(Operand::GradWeight, usize::from(weight), true);
        note(Operand::Output, usize::from(output), false);
        note(Operand::GradOutput, usize::from(output), true);
    };
    // Its input is integers.
    add("words", 0, true, true, true);
    // Not its weight.
    add("norm", 1, false, true, false);
    add("up", 1, true, true, false);
    add("scores", 2, false, true, false);
    // Not its result.
    add("batched", 2, false, false, false);
    add("rms", 1, false, true, false);
    add("ratio", 2, false, true, false);
    add("gate", 2, false, true, false);
    add("residual", 2, false, true, false);
    add("head", 1, true, true, false);
    casts
}

/// The table of the report agrees with what happens.
#[test]
fn the_report_shows_the_casts() {
    let options = with_operators()
        .with_off("norm")
        .unwrap()
        .with_output_fused("up")
        .unwrap();
    let net = Net::new(&VarMap::new()).unwrap();
    let table = prepare_fp8(&net, &options)
        .unwrap()
        .cast_table(RecipeName::Hybrid)
        .unwrap();
    let casts = observed(RecipeName::Hybrid, options);
    let mut shown = vec![];
    for row in &table.rows {
        for (operand, cast) in CAST_TENSORS.iter().zip(&row.casts) {
            // The table does not depend on shapes; it marks tensors that only one of the two products casts.
            let marked = row.of_plain_products_only(*operand);
            assert!(!marked || ["scores", "batched"].contains(&row.path.as_str()));
            if let Some(cast) = cast.filter(|_| !marked || row.path == "scores") {
                shown.push((row.path.clone(), operand.name()));
                let (_, format, ..) = casts[shown.last().unwrap()];
                assert_eq!(cast.format, Some(format), "{} {operand}", row.path);
            }
        }
    }
    shown.sort();
    assert_eq!(shown, casts.into_keys().collect::<Vec<_>>());
    let text = table.to_string();
    let up = text.lines().find(|line| line.starts_with("up ")).unwrap();
    let words: Vec<_> = up.split_whitespace().collect();
    let gradient = "uns_ten_e5m2_sr_inf";
    let expected = [
        "up",
        "linear",
        "cur_ten_e4m3",
        "cur_ten_e4m3",
        "-",
        "-",
        gradient,
        gradient,
    ];
    assert_eq!(words, expected);
}

fn with_operators() -> PrepareOptions {
    PrepareOptions::default().with_operators(true)
}

#[test]
fn direct_casts_every_tensor_of_every_operator() {
    let casts = observed(RecipeName::Direct, with_operators());
    assert_eq!(casts, expected((Format::E5M2, Overflow::NonFinite)));
}

#[test]
fn hybrid_casts_every_tensor_of_every_operator() {
    let casts = observed(RecipeName::Hybrid, with_operators());
    assert_eq!(casts, expected((Format::E4M3, Overflow::Saturate)));
}

#[test]
fn exempt_layers_and_fused_outputs_are_left_out() {
    let options = with_operators().with_off("norm").unwrap();
    let options = options
        .with_output_fused("up")
        .unwrap()
        .with_output_fused("g*")
        .unwrap();
    let mut expected = expected((Format::E5M2, Overflow::NonFinite));
    expected.retain(|(layer, operand), _| {
        let of_output = ["output", "grad_output"].contains(operand);
        layer != "norm" && !(of_output && ["up", "gate"].contains(&layer.as_str()))
    });
    assert_eq!(observed(RecipeName::Direct, options), expected);
}

#[test]
fn named_recipes_leave_operators_alone() {
    let casts = observed(RecipeName::Tensorwise, with_operators());
    let layers: Vec<_> = casts.keys().map(|(layer, _)| layer.as_str()).collect();
    assert!(
        layers.iter().all(|layer| ["up", "head"].contains(layer)),
        "{layers:?}"
    );
    assert!(
        layers.contains(&"up") && layers.contains(&"head"),
        "{layers:?}"
    );
    assert!(
        casts
            .keys()
            .all(|(_, operand)| !["output", "grad_input"].contains(operand))
    );
}

#[test]
fn without_operators_only_layers_are_cast() {
    let casts = observed(RecipeName::Hybrid, PrepareOptions::default());
    let mut expected = expected((Format::E4M3, Overflow::Saturate));
    expected.retain(|(layer, _), _| ["up", "head"].contains(&layer.as_str()));
    assert_eq!(casts, expected);
}

/// Without operators a report names those that would be cast if operators were on: they have state of an earlier preparation, or a recipe of
/// their own that casts operators.
#[test]
fn a_report_names_operators_that_are_off_and_expected() {
    let net = Net::new(&VarMap::new()).unwrap();
    let off = |options: PrepareOptions| -> Vec<String> {
        let layers = prepare_fp8(&net, &options).unwrap().layers.into_iter();
        let off = Outcome::Skipped(SkipReason::OperatorsOff);
        let off = layers.filter(|layer| layer.outcome == off);
        off.filter_map(|layer| layer.path).collect()
    };
    let default = PrepareOptions::default;
    let nothing: [&str; 0] = [];
    assert_eq!(off(default()), nothing);
    let own = |recipe| default().with_recipe("r*", recipe).unwrap();
    assert_eq!(off(own(RecipeName::Rowwise)), nothing);
    assert_eq!(off(own(RecipeName::Hybrid)), ["rms", "ratio", "residual"]);
    assert_eq!(off(with_operators().with_off("norm").unwrap()), nothing);
    let prepared = [
        "words", "scores", "batched", "rms", "ratio", "gate", "residual",
    ];
    assert_eq!(off(default()), prepared);
    assert_eq!(off(default()), nothing);
}

/// Any recipe can also cast results.
#[test]
fn results_of_other_recipes() {
    use fp8::config::{CastConfig, CastRounding};
    let gradient = CastConfig::dynamic_tensorwise().with_rounding(CastRounding::Stochastic);
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
        .with_output(CastConfig::dynamic_tensorwise())
        .with_grad_weight(gradient);
    let casts = observed(config, PrepareOptions::default());
    let of_up = |operand| casts.get(&("up".to_string(), operand)).copied();
    let (saturate, nearest) = (Overflow::Saturate, "nearest");
    assert_eq!(of_up("output"), Some((1, Format::E4M3, nearest, saturate)));
    assert_eq!(
        of_up("grad_weight"),
        Some((1, Format::E5M2, "stochastic", saturate))
    );
    assert_eq!(of_up("grad_input"), None);
    assert_eq!(
        of_up("input_for_grad_weight"),
        Some((1, Format::E4M3, nearest, saturate))
    );
}
