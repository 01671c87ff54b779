//! Inf or NaN in a cast vetoes the optimizer update of the same step, and the report names the tensor.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::{Linear, linear_no_bias};
use fp8::optim::{
    AdamW, AdamWConfig, DynamicLossScaler, NamedOptimizer, OptimError, Sgd, SgdConfig, StepReport,
};
use fp8::{
    Autocast, GradAccumulator, NonFinite, PrepareOptions, Recipe, RecipeName, end_step,
    fp8_autocast, prepare_fp8, with_fp8,
};
use fp8_test_support::{delayed, device, normal};

/// Two layers without biases, whose gradients would show Inf by themselves.
pub struct Mlp {
    pub vars: VarMap,
    pub layers: Vec<Linear>,
}

impl Mlp {
    pub fn new(dtype: DType) -> Self {
        Self::named("fc1", "fc2", dtype)
    }

    pub fn named(first: &str, second: &str, dtype: DType) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, &device());
        let layer = |name: &str| linear_no_bias(64, 64, vb.pp(name)).unwrap();
        let layers = vec![layer(first), layer(second)];
        for (i, name) in [first, second].into_iter().enumerate() {
            let values = (normal(7 + i as u64, (64, 64)) * 0.1).unwrap();
            let var = vars.data().lock().unwrap()[&format!("{name}.weight")].clone();
            var.set(&values.to_dtype(dtype).unwrap()).unwrap();
        }
        let options = PrepareOptions::default().with_amax_history_len(4);
        let report = prepare_fp8(&layers, &options).unwrap();
        assert_eq!(report.converted(), 2);
        Self { vars, layers }
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.to_dtype(self.vars.all_vars()[0].dtype())?;
        for layer in &self.layers {
            y = candle_core::Module::forward(layer, &y)?;
        }
        y.to_dtype(DType::F32)
    }

    pub fn loss(&self, seed: u64, factor: f64) -> Result<Tensor> {
        self.forward(&normal(seed, (8, 64)))?.sqr()?.mean_all()? * factor
    }

    pub fn adamw(&self) -> AdamW {
        AdamW::from_varmap(&self.vars, AdamWConfig::default()).unwrap()
    }

    pub fn var(&self, name: &str) -> Var {
        self.vars.data().lock().unwrap()[name].clone()
    }
}

/// All bits of the variables.
pub fn bits(optimizer: &impl NamedOptimizer) -> Vec<u32> {
    let vars = optimizer.named_vars();
    vars.iter()
        .flat_map(|(_, var)| fp8_test_support::bits(var))
        .collect()
}

pub fn slots(found: &[NonFinite]) -> Vec<&str> {
    found.iter().map(|found| found.slot.as_str()).collect()
}

/// One step with a guard around the forward pass alone.
pub fn step(model: &Mlp, recipe: &Recipe, seed: u64, factor: f64) -> (GradStore, fp8::StepSummary) {
    let guard = fp8_autocast(recipe.clone()).unwrap();
    let loss = model.loss(seed, factor).unwrap();
    let summary = guard.close().unwrap();
    (loss.backward().unwrap(), summary)
}

#[test]
fn inf_gradients_veto_the_step_under_every_recipe() {
    fn check<O: NamedOptimizer, S: PartialEq + std::fmt::Debug>(
        what: &str,
        model: &Mlp,
        recipe: &Recipe,
        mut optimizer: O,
        state: impl Fn(&O) -> S,
    ) {
        let apply = |optimizer: &mut O, factor| -> (StepReport, fp8::StepSummary) {
            let (grads, summary) = step(model, recipe, 3, factor);
            (optimizer.apply_gradients(&grads).unwrap(), summary)
        };
        let (report, summary) = apply(&mut optimizer, 1.);
        assert!(!report.skipped().unwrap(), "{what}");
        assert_eq!(summary.non_finite().unwrap(), [], "{what}");
        let before = (bits(&optimizer), state(&optimizer));
        for factor in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let (report, summary) = apply(&mut optimizer, factor);
            assert!(report.skipped().unwrap(), "{what} {factor}");
            assert!(
                before == (bits(&optimizer), state(&optimizer)),
                "{what} {factor}"
            );
            for found in [report.non_finite().unwrap(), summary.non_finite().unwrap()] {
                assert_eq!(slots(&found)[0], "fc2.grad_output", "{what} {factor}");
            }
            let first = summary.first_non_finite().unwrap();
            assert_eq!(first.as_deref(), Some("fc2.grad_output"), "{what}");
        }
        let (report, summary) = apply(&mut optimizer, 1.);
        assert!(!report.skipped().unwrap(), "{what}: the next clean step");
        assert_eq!(report.non_finite().unwrap(), [], "{what}");
        assert_eq!(summary.non_finite().unwrap(), [], "{what}");
        assert!(before.0 != bits(&optimizer), "{what}: it trains");
    }
    let tensors =
        |optimizer: std::result::Result<std::collections::HashMap<String, Tensor>, OptimError>| {
            let mut all: Vec<_> = optimizer.unwrap().into_iter().collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            let values = all.into_iter().map(|(name, x)| {
                let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
                (name, x.to_vec1::<f64>().unwrap())
            });
            values.collect::<Vec<_>>()
        };
    for name in RecipeName::ALL {
        let recipe = Recipe::from(name);
        let model = Mlp::new(DType::F32);
        let what = |with: &str| format!("{name} {with}");
        check(&what("AdamW"), &model, &recipe, model.adamw(), |o| {
            tensors(o.state())
        });
        let momentum = SgdConfig::default().with_momentum(0.9);
        let sgd = Sgd::from_varmap(&model.vars, momentum).unwrap();
        check(&what("Sgd"), &model, &recipe, sgd, |o| o.steps().unwrap());
        let half = Mlp::new(DType::BF16);
        let masters = AdamWConfig {
            master_weights: true,
            ..AdamWConfig::default()
        };
        let adamw = AdamW::from_varmap(&half.vars, masters).unwrap();
        check(&what("masters"), &half, &recipe, adamw, |o| {
            tensors(o.state())
        });
    }
}

#[test]
fn a_loss_scaler_backs_off() {
    for name in RecipeName::ALL {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut scaler = DynamicLossScaler::default();
        let before = bits(&adamw);
        let mut step = |factor| {
            let loss = with_fp8(name, || model.loss(3, factor)).unwrap();
            scaler.backward_step(&loss, &mut adamw).unwrap()
        };
        let left_out = step(f64::INFINITY);
        assert!(left_out.skipped() && left_out.non_finite() > 0, "{name}");
        let casts = left_out.non_finite_casts().unwrap();
        assert_eq!(slots(&casts)[0], "fc2.grad_output", "{name}");
        // Neither the scaler's nor the optimizer's result remains.
        assert!(!step(1e-6).skipped(), "{name}");
        assert_eq!((adamw.steps().unwrap(), scaler.loss_scale()), (1, 32768.));
        assert!(before != bits(&adamw));
    }
}

#[test]
fn an_inf_in_a_forward_pass_vetoes_too() {
    for name in [RecipeName::Delayed, RecipeName::Current] {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut x = vec![0.5f32; 128];
        x[7] = f32::INFINITY;
        let x = Tensor::from_vec(x, (2, 64), &device()).unwrap();
        let guard = fp8_autocast(name).unwrap();
        let loss = model.forward(&x).unwrap().mean_all().unwrap();
        let summary = guard.close().unwrap();
        let report = adamw.apply(&loss.backward().unwrap()).unwrap();
        assert!(report.skipped().unwrap(), "{name}");
        assert_eq!(
            slots(&report.non_finite().unwrap()),
            ["fc1.input"],
            "{name}"
        );
        assert_eq!(
            slots(&summary.non_finite().unwrap()),
            ["fc1.input"],
            "{name}"
        );
    }
}

#[test]
fn one_micro_batch_of_several_vetoes_their_step() {
    let recipe = || Recipe::from(delayed(4));
    let one_guard = [true, false];
    for (one_guard, bad) in one_guard.into_iter().flat_map(|g| [(g, 0), (g, 1), (g, 2)]) {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut sums = GradAccumulator::new(&model.vars);
        let mut run = |bad: Option<u64>| {
            let guard = one_guard.then(|| fp8_autocast(recipe()).unwrap());
            for batch in 0..3 {
                let factor = if bad == Some(batch) {
                    f64::INFINITY
                } else {
                    1.
                };
                let own = (!one_guard).then(|| fp8_autocast(recipe()).unwrap());
                let loss = model.loss(batch, factor).unwrap();
                drop(own);
                sums.add(loss.backward().unwrap()).unwrap();
            }
            drop(guard);
            let report = adamw.apply(&sums.finish_mean().unwrap()).unwrap();
            report.skipped().unwrap()
        };
        let case = format!("one guard {one_guard}, micro-batch {bad}");
        assert!(!run(None), "{case}");
        assert!(run(Some(bad)), "{case}");
        assert!(!run(None), "{case}: the next step");
    }
}

#[test]
fn backward_passes_after_several_forward_passes_count() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    let mut x = vec![0.5f32; 128];
    x[7] = f32::INFINITY;
    let x = Tensor::from_vec(x, (2, 64), &device()).unwrap();
    let of = |x: &Tensor| with_fp8(delayed(4), || model.forward(x)).unwrap();
    let good = (&x.zeros_like().unwrap() + 1.).unwrap();
    // However many come between.
    for (first, others, expected) in [(&x, 1, true), (&x, 66, true), (&good, 66, false)] {
        let passes = std::iter::once(first).chain(std::iter::repeat_n(&good, others));
        let losses: Vec<Tensor> = passes.map(|x| of(x).mean_all().unwrap()).collect();
        let sum = losses.iter().cloned().reduce(|a, b| (a + b).unwrap());
        let loss = sum.unwrap();
        let grads = loss.backward().unwrap();
        drop((losses, loss));
        assert_eq!(adamw.apply(&grads).unwrap().skipped().unwrap(), expected);
    }
    // A forward pass without a backward pass, as for a skipped batch, vetoes nothing.
    of(&x);
    let grads = of(&good).mean_all().unwrap().backward().unwrap();
    assert!(!adamw.apply(&grads).unwrap().skipped().unwrap());
}

#[test]
fn models_veto_their_own_optimizers() {
    let models =
        ["a", "b"].map(|name| Mlp::named(&format!("{name}1"), &format!("{name}2"), DType::F32));
    let mut optimizers = [0, 1].map(|i: usize| models[i].adamw());
    for one_guard in [true, false] {
        let outer = one_guard.then(|| fp8_autocast(delayed(4)).unwrap());
        let grads = [f64::INFINITY, 1.]
            .iter()
            .zip(&models)
            .map(|(factor, model)| {
                let loss = with_fp8(delayed(4), || model.loss(1, *factor)).unwrap();
                loss.backward().unwrap()
            });
        let grads: Vec<_> = grads.collect();
        drop(outer);
        let skipped = [0, 1].map(|i: usize| {
            let report = optimizers[i].apply(&grads[i]).unwrap();
            report.skipped().unwrap()
        });
        assert_eq!(skipped, [true, false], "one guard {one_guard}");
    }
}

#[test]
fn a_backward_pass_on_another_thread_counts() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    for (factor, expected) in [(f64::INFINITY, true), (1., false)] {
        let loss = with_fp8(delayed(4), || model.loss(1, factor)).unwrap();
        let grads = std::thread::scope(|scope| {
            let thread = scope.spawn(|| loss.backward().unwrap());
            thread.join().unwrap()
        });
        assert_eq!(adamw.apply(&grads).unwrap().skipped().unwrap(), expected);
    }
}

#[test]
fn steps_inside_of_one_guard() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    let guard = fp8_autocast(delayed(4)).unwrap();
    for factor in [1., f64::INFINITY, 1., f64::INFINITY, f64::INFINITY, 1.] {
        let grads = model.loss(1, factor).unwrap().backward().unwrap();
        let report = adamw.apply(&grads).unwrap();
        assert_eq!(report.skipped().unwrap(), factor.is_infinite());
        let summary = end_step().unwrap();
        let found = summary.non_finite().unwrap();
        assert_eq!(
            slots(&found).first().copied(),
            factor.is_infinite().then_some("fc2.grad_output")
        );
    }
    guard.close().unwrap();
}

#[test]
fn aborted_steps_and_evaluation_veto_nothing() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    let x = Tensor::full(f32::INFINITY, (2, 64), &device()).unwrap();
    let guard = fp8_autocast(delayed(4)).unwrap();
    let loss = model.forward(&x).unwrap();
    loss.backward().unwrap();
    guard.abort();
    let (grads, summary) = step(&model, &delayed(4).into(), 1, 1.);
    assert!(!adamw.apply(&grads).unwrap().skipped().unwrap());
    assert_eq!(summary.first_non_finite().unwrap(), None);

    for name in [RecipeName::Delayed, RecipeName::Current] {
        // Inside of a training step, and between its forward pass and its optimizer.
        let guard = fp8_autocast(name).unwrap();
        let loss = model.loss(1, 1.).unwrap();
        let evaluation = || Autocast::new(Recipe::from(name)).training(false);
        with_fp8(evaluation(), || model.forward(&x)).unwrap();
        guard.close().unwrap();
        with_fp8(evaluation(), || model.forward(&x)).unwrap();
        let report = adamw.apply(&loss.backward().unwrap()).unwrap();
        assert!(!report.skipped().unwrap(), "{name}");
    }
}
