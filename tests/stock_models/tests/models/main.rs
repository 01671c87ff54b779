//! Model files of candle-transformers with replaced `use` lines: what they compute, and their gradients.

mod cases;

use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor};
use cases::{all, names, wave, Case};
use fp8::load::Checkpoint;
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{
    check_gradients, fp8_autocast, prepare_fp8, save_calibrated_with, Autocast, Error,
    ExportOptions, LayerKind, Outcome, PrepareOptions, PrepareReport, Recipe,
};
use fp8_stock_models::{Change, CARRIED};
use fp8_test_support::rounding::two_orders;
use fp8_test_support::{assert_close, assert_served, flat, wave_f32};

fn delayed() -> Recipe {
    "delayed".parse().unwrap()
}

/// How many linear layers were converted, and how many were not. Convolutions are listed too.
fn linears(report: &PrepareReport) -> (usize, usize) {
    let layers = || {
        report
            .layers
            .iter()
            .filter(|layer| layer.kind == LayerKind::Linear)
    };
    let converted = layers()
        .filter(|layer| matches!(layer.outcome, Outcome::Converted(_)))
        .count();
    (converted, layers().count() - converted)
}

/// Convolutions stay in high precision, as files hold them.
fn prepare(case: &Case) {
    let options = PrepareOptions::default().with_convolutions(false);
    let report = prepare_fp8(&case.model, &options).unwrap();
    assert_eq!(
        linears(&report),
        (case.linears, 0),
        "{}: {report}",
        case.name
    );
}

/// A fixed projection of the output.
fn projected(y: &Tensor) -> Result<Tensor> {
    (y * wave(99, y.dims()))?.sum_all()
}

#[test]
fn only_use_lines_and_derive_lines_differ() {
    // (use lines replaced, use lines added, derive lines)
    for (name, expected) in [
        ("llama", (1, 1, 4)),
        ("bert", (1, 1, 16)),
        ("vit", (1, 1, 10)),
        ("whisper", (1, 1, 4)),
    ] {
        let file = CARRIED.iter().find(|file| file.name == name).unwrap();
        let mut counts = (0, 0, 0);
        let lines = file.stock.lines().count();
        println!("{name}, {lines} lines");
        for change in file.changes() {
            match change {
                Change::ReplacedUse(stock, ours) => {
                    counts.0 += 1;
                    println!("  -{stock}\n  +{ours}");
                }
                Change::AddedUse(ours) => {
                    counts.1 += 1;
                    println!("  +{ours}");
                }
                Change::Derive(derive, below) => {
                    counts.2 += 1;
                    println!("  +{derive}\n   {below}");
                    let declares = ["struct ", "pub struct ", "enum ", "pub enum "];
                    assert!(
                        declares.iter().any(|word| below.starts_with(word)),
                        "{below}"
                    );
                }
                Change::Other(stock, ours) => panic!("{name}: {stock:?} became {ours:?}"),
            }
        }
        assert_eq!(counts, expected, "{name}");
    }
}

/// Sums that our layers add up in another order than the stock ones: in each of two blocks two norms over 16 features and a softmax
/// over at most 6 keys, and a norm at the end.
const FUSED: usize = 2 * (2 * 16 + 6) + 16;

#[test]
fn outside_a_guard_the_models_are_the_stock_ones() {
    for case in all() {
        let expected = (case.stock)().unwrap();
        for prepared in [false, true] {
            if prepared {
                prepare(&case);
            }
            let got = (case.forward)().unwrap();
            assert_close(case.name, &got, &expected, two_orders(FUSED));
        }
    }
}

#[test]
fn the_stock_models_lose_gradients() {
    let lost: Vec<_> = all()
        .iter()
        .map(|case| {
            let grads = projected(&(case.stock)().unwrap()).unwrap().backward();
            let missing = check_gradients(&case.vars, &grads.unwrap()).len();
            (case.name, missing, names(&case.vars).len())
        })
        .collect();
    let expected = [
        ("llama", 20, 21),
        ("bert", 41, 43),
        ("vit", 16, 40),
        ("whisper", 63, 64),
    ];
    assert_eq!(
        lost, expected,
        "(model, variables without a gradient, of all)"
    );
}

#[test]
fn every_gradient_equals_finite_differences() {
    // Central differences over five points are off by the fourth power of the step, and by the rounding of f32 outputs (about
    // 1e-6 of them) over the step. At 1e-2 and for these values the worst of all is 3e-4 of the largest gradient of its variable, or of 1.
    const STEP: f32 = 1e-2;
    const TOLERANCE: f64 = 1e-3;
    for case in all() {
        prepare(&case);
        let loss = || -> f64 {
            let y = (case.forward)().unwrap();
            let products = flat(&y).into_iter().zip(flat(&wave(99, y.dims())));
            products.map(|(y, w)| f64::from(y) * f64::from(w)).sum()
        };
        let y = (case.forward)().unwrap();
        let grads = projected(&y).unwrap().backward().unwrap();
        assert_eq!(check_gradients(&case.vars, &grads), Vec::<String>::new());
        for name in names(&case.vars) {
            let var = case.vars.data().lock().unwrap()[&name].clone();
            let grad = flat(grads.get(&var).unwrap());
            let original = var.as_tensor().copy().unwrap();
            // The largest gradient, and two others.
            let largest = (0..grad.len()).max_by(|&a, &b| grad[a].abs().total_cmp(&grad[b].abs()));
            let entries = [largest.unwrap(), grad.len() / 3, grad.len() - 1];
            let scale = f64::from(grad[entries[0]].abs()).max(1.);
            for at in entries {
                let shifted = |steps: f32| {
                    let mut x = flat(&original);
                    x[at] += steps * STEP;
                    let x = Tensor::from_vec(x, original.dims(), &Device::Cpu).unwrap();
                    var.set(&x).unwrap();
                    loss()
                };
                let near = shifted(1.) - shifted(-1.);
                let far = shifted(2.) - shifted(-2.);
                let slope = (8. * near - far) / (12. * f64::from(STEP));
                assert!(
                    (f64::from(grad[at]) - slope).abs() <= TOLERANCE * scale,
                    "{}: `{name}`, element {at}: gradient {}, slope {slope}, scale {scale}",
                    case.name,
                    grad[at]
                );
            }
            var.set(&original).unwrap();
        }
    }
}

#[test]
fn the_models_train_under_delayed_scaling() {
    const STEPS: usize = 40;
    for case in all() {
        prepare(&case);
        let target = wave_f32((case.forward)().unwrap().dims(), 55);
        let config = AdamWConfig {
            lr: 3e-3,
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::from_varmap(&case.vars, config).unwrap();
        let mut losses = vec![];
        for step in 0..STEPS {
            let guard = fp8_autocast(delayed()).unwrap();
            let y = (case.forward)().unwrap();
            let summary = guard.close().unwrap();
            assert_eq!(summary.layers(), case.linears, "{}", case.name);
            let loss = (y - &target).unwrap().sqr().unwrap().mean_all().unwrap();
            losses.push(loss.to_scalar::<f32>().unwrap());
            let grads = loss.backward().unwrap();
            let missing = check_gradients(&case.vars, &grads);
            assert!(
                missing.is_empty(),
                "{}, step {step}: {missing:?}",
                case.name
            );
            if step == 0 {
                all_reached(&case, &grads);
            }
            assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
        }
        let (first, last) = (losses[0], losses[STEPS - 1]);
        assert!(last < 0.6 * first, "{}: {losses:?}", case.name);
    }
}

/// Every variable has a gradient that is not 0. The softmax of attention does not change with the bias of its keys, whose
/// gradient is 0 but for rounding.
fn all_reached(case: &Case, grads: &GradStore) {
    for name in names(&case.vars) {
        let var = case.vars.data().lock().unwrap()[&name].clone();
        let grad = flat(grads.get(&var).unwrap());
        assert!(grad.iter().all(|g| g.is_finite()), "{}: {name}", case.name);
        let reached = grad.iter().any(|&g| g != 0.);
        assert!(
            reached || name.ends_with("key.bias"),
            "{}: {name}",
            case.name
        );
    }
}

#[test]
fn a_head_tied_to_the_embedding_stays_in_high_precision() {
    let case = cases::llama(true);
    let report = prepare_fp8(&case.model, &PrepareOptions::default()).unwrap();
    assert_eq!(
        (report.converted(), report.skipped()),
        (case.linears, 1),
        "{report}"
    );
    let skipped = report.layers.last().unwrap();
    // It is made of a bare tensor, `Linear::from_weights(wte.embeddings().clone(), None)`.
    assert!(matches!(skipped.outcome, Outcome::Skipped(_)), "{report}");
    let guard = fp8_autocast(delayed()).unwrap();
    let y = (case.forward)().unwrap();
    guard.close().unwrap();
    let grads = projected(&y).unwrap().backward().unwrap();
    assert!(check_gradients(&case.vars, &grads).is_empty());
}

#[test]
fn calibrated_models_are_saved_under_the_names_of_their_variables() {
    for case in all().into_iter().chain([cases::llama(true)]) {
        let report = prepare_fp8(&case.model, &PrepareOptions::default()).unwrap();
        let guard = fp8_autocast(Autocast::new(delayed()).calibrating(true)).unwrap();
        (case.forward)().unwrap();
        guard.close().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = ExportOptions::new().with_vars(&case.vars);
        let saved = save_calibrated_with(&case.model, dir.path(), &options).unwrap();
        // Convolutions are stored in high precision.
        assert_eq!(saved.quantized.len(), linears(&report).0, "{}", case.name);
        // Tables of sines and masks are left out; scales come along.
        let file = Checkpoint::open(&[&saved.model]).unwrap();
        let mut stored = file.names();
        stored.retain(|name| !name.ends_with("_scale"));
        stored.sort();
        assert_eq!(stored, names(&case.vars), "{}", case.name);
        // Without the VarMap the bare tensors of some models have no name.
        let unnamed = match save_calibrated_with(&case.model, dir.path(), &ExportOptions::new()) {
            Ok(_) => false,
            Err(Error::Layer(fp8::LayerError::Unnamed { .. })) => true,
            Err(error) => panic!("{}: {error}", case.name),
        };
        assert_eq!(
            unnamed,
            ["vit", "whisper"].contains(&case.name),
            "{}",
            case.name
        );
    }
}

#[test]
fn an_exported_model_is_served_by_the_same_file() {
    use fp8_stock_models::vit;
    let case = all().into_iter().find(|case| case.name == "vit").unwrap();
    prepare(&case);
    let guard = fp8_autocast(Autocast::new(delayed()).calibrating(true)).unwrap();
    (case.forward)().unwrap();
    guard.close().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = ExportOptions::new().with_vars(&case.vars);
    let saved = save_calibrated_with(&case.model, dir.path(), &options).unwrap();
    let vb = fp8::load::var_builder(&[saved.model], DType::F32, &Device::Cpu).unwrap();
    let served = vit::Model::new(&cases::vit_config(), 5, vb).unwrap();
    let served = served.forward(&cases::vit_input()).unwrap();
    let guard = fp8_autocast(Autocast::new(delayed()).training(false)).unwrap();
    let expected = (case.forward)().unwrap();
    guard.close().unwrap();
    assert_served("vit", &served, &expected);
}
