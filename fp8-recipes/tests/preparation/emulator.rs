//! Runs of an emulator: micro-batches, checkpoints, which steps are measured, what a failed step leaves.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8_recipes::optim::{LossScalerConfig, MasterDType, Sgd, SgdConfig};
use fp8_recipes::{
    CastStats, Error, Fp8Module, Fp8Operator, GradAccumulator, StatsCurves, fp8_autocast, nn,
    with_fp8,
};
use fp8_test_support::{cpu_tensor, flat, named};

const CPU: &Device = &Device::Cpu;

#[derive(Fp8Module)]
struct Net {
    up: nn::Linear,
    residual: nn::Add,
    down: nn::Linear,
}

struct Run {
    vars: VarMap,
    net: Net,
    emulator: Emulator,
    optimizer: Sgd,
}

impl Run {
    /// The same weights each time.
    fn new(options: EmulatorOptions) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU);
        let net = Net {
            up: nn::linear(16, 16, vb.pp("up")).unwrap(),
            residual: nn::Add::new("residual"),
            down: nn::linear(16, 4, vb.pp("down")).unwrap(),
        };
        for (name, var) in vars.data().lock().unwrap().iter() {
            let seed = name.bytes().map(u64::from).sum();
            var.set(&(cpu_tensor(seed, var.dims()) * 0.3).unwrap())
                .unwrap();
        }
        let emulator = Emulator::initialize(&net, EmulationMethod::Direct, options).unwrap();
        let config = SgdConfig::default().with_lr(0.02).with_momentum(0.9);
        let optimizer = Sgd::from_varmap(&vars, config.with_masters(MasterDType::F16)).unwrap();
        Self {
            vars,
            net,
            emulator,
            optimizer,
        }
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.net.residual.forward(&self.net.up.forward(x)?, x)?;
        self.net.down.forward(&y)?.sqr()?.mean_all()
    }

    fn loss(&self, x: &Tensor) -> Tensor {
        with_fp8(self.emulator.autocast(), || self.forward(x)).unwrap()
    }

    /// Whether it was left out.
    fn step(&mut self, batch: u64, overflows: bool) -> bool {
        let loss = self.loss(&cpu_tensor(batch, &[8, 16]));
        let loss = match overflows {
            true => (loss * f64::INFINITY).unwrap(),
            false => loss,
        };
        let step = self.emulator.optimizer_step(&mut self.optimizer, &loss);
        step.unwrap().skipped()
    }

    fn weights(&self) -> Vec<f32> {
        let vars = named(&self.vars);
        vars.iter().flat_map(|(_, var)| flat(var)).collect()
    }

    fn bits(&self) -> (Vec<u32>, u64, f64, u64) {
        let scaler = self.emulator.loss_scaler();
        let bits = self.weights().into_iter().map(f32::to_bits).collect();
        let (scale, clean) = (scaler.loss_scale(), scaler.clean_steps());
        (bits, self.emulator.global_steps(), scale, clean)
    }
}

fn options() -> EmulatorOptions {
    let scaler = LossScalerConfig::default().with_growth_interval(4);
    EmulatorOptions::default().with_loss_scaler(scaler.with_initial_loss_scale(8.))
}

/// Saved after an overflow and one clean step, in the middle of a growth interval.
#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let mut run = Run::new(options());
    let skipped: Vec<_> = (0..4).map(|step| run.step(step, step == 2)).collect();
    assert_eq!(skipped, [false, false, true, false]);
    let meta = TrainingMeta {
        step: 4,
        recipe: None,
        random: serde_json::Value::Null,
        extra: serde_json::Value::Null,
    };
    let optimizer = run.emulator.with_optimizer(&mut run.optimizer);
    save_training(&path, &run.net, &run.vars, &optimizer, &meta).unwrap();
    let rest = |run: &mut Run| -> Vec<_> {
        let step = |step| {
            assert!(!run.step(step, false));
            run.bits()
        };
        (4..9).map(step).collect()
    };
    let expected = rest(&mut run);
    let scales: Vec<_> = expected.iter().map(|(.., scale, _)| *scale).collect();
    assert_eq!(
        scales,
        [4., 4., 8., 8., 8.],
        "the third step ends four clean ones"
    );

    let mut again = Run::new(options());
    let mut optimizer = again.emulator.with_optimizer(&mut again.optimizer);
    resume_training(&path, &again.net, &again.vars, &mut optimizer, None).unwrap();
    assert_eq!(again.emulator.global_steps(), 4);
    assert_eq!(rest(&mut again), expected);

    // An optimizer alone takes its part of the file.
    let mut alone = Run::new(options());
    resume_training(&path, &alone.net, &alone.vars, &mut alone.optimizer, None).unwrap();
    assert_eq!(alone.emulator.global_steps(), 0);
    // A loss scale that this run cannot have: nothing is changed.
    let capped = LossScalerConfig::default().with_initial_loss_scale(2.);
    let capped = EmulatorOptions::default().with_loss_scaler(capped.with_max_loss_scale(2.));
    let mut other = Run::new(capped);
    let before = other.bits();
    let mut optimizer = other.emulator.with_optimizer(&mut other.optimizer);
    let refused = resume_training(&path, &other.net, &other.vars, &mut optimizer, None);
    assert!(refused.unwrap_err().to_string().contains("loss_scale = 4"));
    assert_eq!(other.bits(), before);
}

/// In high precision, so that a batch and its parts give the same but for the order of sums.
#[test]
fn micro_batches_are_the_batch_of_their_mean() {
    let plain = || options().with_exempt("*");
    let (mut whole, mut parts) = (Run::new(plain()), Run::new(plain()));
    let sgd = |run: &Run| {
        Sgd::from_varmap(
            &run.vars,
            SgdConfig::default().with_lr(0.05).with_momentum(0.9),
        )
        .unwrap()
    };
    (whole.optimizer, parts.optimizer) = (sgd(&whole), sgd(&parts));
    let mut sum = GradAccumulator::new(&parts.vars);
    for step in 0..7 {
        let overflows = step == 3;
        assert_eq!(whole.step(step, overflows), overflows);
        for (i, x) in cpu_tensor(step, &[8, 16])
            .chunk(4, 0)
            .unwrap()
            .iter()
            .enumerate()
        {
            let loss = parts.loss(x);
            let loss = match overflows && i == 1 {
                true => (loss * f64::INFINITY).unwrap(),
                false => loss,
            };
            let scaled = parts.emulator.loss_scaler().scaled(&loss).unwrap();
            sum.add(scaled.backward().unwrap()).unwrap();
        }
        let before = parts.weights();
        let mut grads = sum.finish_mean().unwrap();
        let taken = (parts.emulator)
            .optimizer_step_with_grads(&mut parts.optimizer, &mut grads)
            .unwrap();
        assert_eq!(
            (taken.skipped(), before == parts.weights()),
            (overflows, overflows)
        );
        // Sums of at most 8 * 16 products of numbers below 4, in two orders, over at most 7 steps.
        let bound = 7. * 128. * 4. * f32::EPSILON;
        for (a, b) in whole.weights().into_iter().zip(parts.weights()) {
            assert!((a - b).abs() <= bound, "{step}: {a} {b}");
        }
    }
    for run in [&whole, &parts] {
        let scaler = run.emulator.loss_scaler();
        let counts = (run.emulator.global_steps(), scaler.skipped_steps());
        assert_eq!((counts, scaler.loss_scale()), ((7, 1), 4.));
    }
}

/// The rows of a step carry its number, and evaluation in between leaves no trace in them.
#[test]
fn every_nth_step_is_logged_under_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stats.jsonl");
    let mut run = Run::new(options().with_stats_log(&path, 3));
    let mut due = vec![];
    for step in 0..7 {
        due.push(run.emulator.measures_this_step());
        let x = (cpu_tensor(step, &[8, 16]) * 1000.).unwrap();
        with_fp8(run.emulator.autocast().training(false), || run.forward(&x)).unwrap();
        run.step(step, false);
    }
    assert_eq!(due, [true, false, false, true, false, false, true]);
    assert_eq!(StatsCurves::from_file(&path).unwrap().steps(), [0, 3, 6]);
    let lines = std::fs::read_to_string(&path).unwrap();
    let rows = lines.lines().map(serde_json::from_str::<serde_json::Value>);
    for row in rows.map(Result::unwrap) {
        // The sum has two inputs.
        let inputs = row["layer"] == "residual" && row["operand"] == "input";
        assert_eq!(row["casts"], if inputs { 2 } else { 1 }, "{row}");
        if row["operand"] == "input" && row["layer"] == "up" {
            assert!(row["amax"].as_f64().unwrap() <= 1., "{row}");
        }
    }
    // Who asks for the measures of an evaluation gets them.
    let (stats, asked) = (CastStats::default(), CastStats::default());
    let run = Run::new(options().with_stats(&stats, 1));
    let autocast = run.emulator.autocast().training(false);
    with_fp8(autocast.with_stats(&asked), || {
        run.forward(&cpu_tensor(1, &[8, 16]))
    })
    .unwrap();
    assert!(stats.report().rows.is_empty());
    assert!(!asked.report().rows.is_empty());
}

#[test]
fn a_log_that_cannot_be_written_costs_no_step() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(options().with_stats_log(dir.path().join("missing/stats.jsonl"), 1));
    assert!(!run.step(0, false) && !run.step(1, false));
    assert!(run.emulator.stats_log().unwrap().failure().is_some());
}

/// A pattern that names nothing is found before anything changes.
#[test]
fn a_refused_model_is_as_it_was() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU);
    let layer = nn::linear(16, 16, vb.pp("up")).unwrap();
    let options = EmulatorOptions::default().with_exempt("upp");
    let error = Emulator::initialize(&layer, EmulationMethod::Direct, options).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Config(fp8_recipes::config::ConfigError::UnmatchedPattern { .. })
        ),
        "{error}"
    );
    assert!(layer.fp8_state().is_none());
}

/// The toolkit's own example list: `conv1`, `bn1`, `fc`.
#[test]
fn a_batch_norm_may_be_exempt() {
    #[derive(Fp8Module)]
    struct Small {
        conv1: nn::Conv2d,
        bn1: nn::BatchNorm,
        fc: nn::Linear,
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU);
    let root = vb.pp("net");
    let net = Small {
        conv1: nn::conv2d(3, 16, 3, Default::default(), root.pp("conv1")).unwrap(),
        bn1: nn::batch_norm(16, 1e-5, root.pp("bn1")).unwrap(),
        fc: nn::linear(16, 16, root.pp("fc")).unwrap(),
    };
    let exempt = |names: &[&str]| {
        let options = EmulatorOptions::default();
        let options = names.iter().fold(options, |o, name| o.with_exempt(*name));
        Emulator::initialize(&net, EmulationMethod::Direct, options)
    };
    let emulator = exempt(&["net.conv1", "net.bn1", "net.fc"]).unwrap();
    let report = emulator.report();
    assert_eq!(report.converted(), 0);
    assert_eq!(report.high_precision_anyway, ["net.bn1"]);
    let text = report.to_string();
    assert!(
        text.contains("note: `net.bn1` is in high precision anyway"),
        "{text}"
    );
    // `net` holds layers, which it does not leave out; `net.bn2` is nothing.
    for pattern in ["net", "net.bn2"] {
        let error = exempt(&[pattern]).unwrap_err().to_string();
        assert!(
            error.contains(pattern) && error.contains("net.bn1"),
            "{error}"
        );
    }
    // What is not converted under these options may be named, a recipe for it is a mistake.
    use fp8_recipes::{PrepareOptions, prepare_fp8};
    let options = PrepareOptions::default().with_convolutions(false);
    let options = options.with_off("net.conv1").unwrap();
    let options = options.with_recipe("net.bn1", "rowwise".parse::<fp8_recipes::Recipe>().unwrap());
    let report = prepare_fp8(&net, &options.unwrap()).unwrap();
    assert_eq!(report.high_precision_anyway, ["net.conv1"]);
    assert_eq!(report.unmatched[0].pattern, "net.bn1");
}

/// An operator that fails inside a guard is a step that has not happened, as with a layer.
#[test]
fn a_failed_operator_aborts_the_step() {
    let recipe = || "delayed".parse::<fp8_recipes::Recipe>().unwrap();
    let scale = |fails: bool| {
        let run = Run::new(options());
        let guard = fp8_autocast(recipe()).unwrap();
        run.net.up.forward(&cpu_tensor(1, &[8, 16])).unwrap();
        if fails {
            let (a, b) = (cpu_tensor(1, &[8, 16]), cpu_tensor(1, &[8, 15]));
            let error = run.net.residual.forward(&a, &b).unwrap_err().to_string();
            assert!(error.contains("broadcast_add"), "{error}");
        }
        drop(guard);
        let state = run.net.up.fp8_state().unwrap();
        let slot = state.slot(fp8_recipes::Role::Input).unwrap().tensors();
        let scale = slot.unwrap().dequant_scale.flatten_all().unwrap();
        scale.to_vec1::<f32>().unwrap()[0]
    };
    assert_eq!(scale(true), 1.);
    assert_ne!(scale(false), 1.);
}

/// An operator that has the path of a layer, or another kind of operator's, is reported and stays in high precision.
#[test]
fn an_operator_with_a_taken_path_is_reported() {
    use fp8_recipes::config::SkipReason;
    use fp8_recipes::{LayerFilter, Outcome, PrepareOptions, prepare_fp8};
    #[derive(Fp8Module)]
    struct Clash {
        fc: nn::Linear,
        add: nn::Add,
        gate: nn::Mul,
        ratio: nn::Div,
        again: nn::Div,
    }
    let weight = cpu_tensor(1, &[16, 16]);
    let net = Clash {
        fc: nn::Linear::new(weight, None).with_path("fc"),
        add: nn::Add::new("fc"),
        gate: nn::Mul::new("gate"),
        ratio: nn::Div::new("gate"),
        again: nn::Div::new("ratio"),
    };
    // Also with state from a time when the path was free.
    let options = || PrepareOptions::default().with_operators(true);
    let filter = LayerFilter::new().skip_paths(["fc"]);
    prepare_fp8(&net, &options().with_filter(filter)).unwrap();
    assert!(net.add.fp8_state().is_some());
    let report = prepare_fp8(&net, &options()).unwrap();
    let skipped = report
        .layers
        .iter()
        .filter(|layer| matches!(layer.outcome, Outcome::Skipped(SkipReason::SamePath)));
    let skipped: Vec<_> = skipped.map(|layer| layer.kind.to_string()).collect();
    assert_eq!(skipped, ["add", "div"]);
    assert!(net.add.fp8_state().is_none() && net.ratio.fp8_state().is_none());
    let meta = TrainingMeta {
        step: 0,
        recipe: None,
        random: serde_json::Value::Null,
        extra: serde_json::Value::Null,
    };
    let dir = tempfile::tempdir().unwrap();
    let optimizer = fp8_recipes::optim::NoOptimizer;
    let path = dir.path().join("run.safetensors");
    save_training(path, &net, &VarMap::new(), &optimizer, &meta).unwrap();
}
