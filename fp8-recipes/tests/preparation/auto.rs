//! Layers are converted where they are faster in FP8. Times come from a table, except where measuring is what is tested.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::SkipReason;
use fp8_recipes::load::Checkpoint;
use fp8_recipes::nn::{self, DenseConfig, Linear};
use fp8_recipes::timings::{
    Computation, LayerCase, LayerTiming, LayerTimings, decode_where_faster,
};
use fp8_recipes::{
    Fp8Module, LayerFilter, Note, Outcome, PrepareOptions, RecipeName, fp8_autocast, prepare_fp8,
};
use fp8_test_support::tensor;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CPU: Device = Device::Cpu;

pub fn micros(fp8: u64, high_precision: u64) -> LayerTiming {
    let time = Duration::from_micros;
    LayerTiming::new(time(fp8), time(high_precision))
}

/// Times of a machine on which FP8 costs 100 us and then half of the time of high precision, which is 1 us for 1000 products. Keeps
/// what it was asked for.
pub fn table() -> (LayerTimings, Arc<Mutex<Vec<LayerCase>>>) {
    let asked = Arc::new(Mutex::new(vec![]));
    let log = asked.clone();
    let timings = LayerTimings::new().without_file();
    let timings = timings.with_clock(move |case, _| {
        log.lock().unwrap().push(case.clone());
        let time = (case.out_features * case.in_features * case.tokens / 1000) as u64;
        Ok(micros(100 + time / 2, time.max(1)))
    });
    (timings, asked)
}

#[derive(Fp8Module)]
struct Net {
    large: Linear,
    tiny: Linear,
    twin: Linear,
}

fn net(dtype: DType) -> Net {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, dtype, &CPU);
    let layer = |inputs, outputs, name| nn::linear(inputs, outputs, vb.pp(name)).unwrap();
    Net {
        large: layer(64, 128, "large"),
        tiny: layer(8, 16, "tiny"),
        twin: layer(64, 128, "twin"),
    }
}

#[test]
fn a_large_layer_is_converted_and_a_tiny_one_left() {
    let net = net(DType::F32);
    let (timings, asked) = table();
    let options = PrepareOptions::auto(RecipeName::Delayed, 32).with_timings(timings);
    // State of an earlier preparation is taken away.
    prepare_fp8(&net, &PrepareOptions::default()).unwrap();
    let report = prepare_fp8(&net, &options).unwrap();
    assert_eq!((report.converted(), report.skipped()), (2, 1));
    let text = report.to_string();
    for part in [
        "fp8 (was prepared before; 1.13x as fast: 0.231 ms against 0.262 ms",
        "high precision: no faster in FP8 here: 0.102 ms against 0.004 ms for 32 tokens under `delayed`",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let state = [&net.large, &net.tiny, &net.twin].map(|layer| layer.fp8_state().is_some());
    assert_eq!(state, [true, false, true]);
    // Layers of one shape are measured once.
    let training = || Computation::training(RecipeName::Delayed);
    let case = |shape| LayerCase::new(training(), shape, 32);
    assert_eq!(*asked.lock().unwrap(), [case((128, 64)), case((16, 8))]);

    // Inside a guard the layer that was left computes what it computes outside.
    let x = tensor(1, &[32, 8]);
    let expected = net.tiny.forward(&x).unwrap();
    let guard = fp8_autocast("delayed").unwrap();
    let y = net.tiny.forward(&x).unwrap();
    net.large.forward(&tensor(2, &[32, 64])).unwrap();
    assert_eq!(guard.close().unwrap().layers(), 1);
    let bits = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(bits(&y), bits(&expected));
}

#[test]
fn what_is_timed_is_what_the_layer_will_do() {
    let (timings, asked) = table();
    let options = PrepareOptions::auto_evaluation(RecipeName::Rowwise, 4)
        .with_timings(timings)
        .with_recipe("twin", RecipeName::Tensorwise)
        .unwrap();
    let net = net(DType::BF16);
    prepare_fp8(&net, &options).unwrap();
    let case = |recipe, shape| {
        LayerCase::new(Computation::evaluation(recipe), shape, 4).with_dtype(DType::BF16)
    };
    let expected = [
        case(RecipeName::Rowwise, (128, 64)),
        case(RecipeName::Rowwise, (16, 8)),
        case(RecipeName::Tensorwise, (128, 64)),
    ];
    assert_eq!(*asked.lock().unwrap(), expected);
}

#[test]
fn layers_that_are_left_out_anyway_are_not_timed() {
    let (timings, asked) = table();
    let options = PrepareOptions::auto(RecipeName::Delayed, 32)
        .with_timings(timings)
        .with_filter(LayerFilter::new().with_min_dims(17, 0))
        .with_off("t*")
        .unwrap();
    let report = prepare_fp8(&net(DType::F32), &options).unwrap();
    let faster = |outcome: &Outcome| match outcome {
        Outcome::Converted(notes) => matches!(notes.as_slice(), [Note::Faster(_)]),
        _ => false,
    };
    let taken: Vec<bool> = report.layers.iter().map(|l| faster(&l.outcome)).collect();
    assert_eq!(taken, [true, false, false]);
    assert_eq!(asked.lock().unwrap().len(), 1);
    // Convolutions have no time of their own.
    assert!(!options.convolutions && PrepareOptions::default().convolutions);
}

#[test]
fn layers_with_batch_axes_have_no_times_and_are_left() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
    let config = DenseConfig::new([16]).with_batch_axis([0]);
    let experts = nn::dense_general(&[2, 5, 16], config, vb.pp("experts")).unwrap();
    let (timings, asked) = table();
    let options = PrepareOptions::auto(RecipeName::Delayed, 32).with_timings(timings);
    let report = prepare_fp8(&experts, &options).unwrap();
    let outcome = &report.get("experts").unwrap().outcome;
    assert_eq!(*outcome, Outcome::Skipped(SkipReason::NotTimed), "{report}");
    assert!(experts.fp8_state().is_none() && asked.lock().unwrap().is_empty());
    // As the reason says.
    let report = prepare_fp8(&experts, &PrepareOptions::default()).unwrap();
    assert_eq!(report.converted(), 1, "{report}");
}

#[test]
fn small_gains_do_not_count() {
    assert!(micros(100, 104).fp8_pays);
    assert!(!micros(100, 102).fp8_pays);
    assert!(!micros(100, 50).fp8_pays);
    assert_eq!(micros(4, 2).speedup(), 0.5);
    assert!(micros(0, 1).speedup().is_finite());
}

#[test]
fn sizes_and_recipes_that_cannot_be_timed_are_errors() {
    let (timings, asked) = table();
    let error = |recipe, shape, tokens| {
        let case = LayerCase::new(Computation::Training(Box::new(recipe)), shape, tokens);
        timings.get(&case, &CPU).unwrap_err().to_string()
    };
    let delayed = || RecipeName::Delayed.into();
    assert_eq!(
        error(delayed(), (1, 1), 0),
        "a layer to time has tokens = 0, expected at least 1"
    );
    assert!(error(delayed(), (0, 1), 1).contains("out_features = 0"));
    assert!(error(delayed(), (1, 0), 1).contains("in_features = 0"));
    let long = fp8_recipes::DelayedScaling::default().with_amax_history_len(0);
    assert!(error(long.into(), (1, 1), 1).contains("amax_history_len = 0"));
    assert!(asked.lock().unwrap().is_empty());
    // An error of the measurement is passed on, and nothing is remembered.
    let failing = timings.with_clock(|_, _| Err(candle_core::Error::msg("no clock").into()));
    let options = PrepareOptions::auto(RecipeName::Delayed, 1).with_timings(failing);
    let error = prepare_fp8(&net(DType::F32), &options).unwrap_err();
    assert!(error.to_string().contains("no clock"), "{error}");
}

/// Every kind of call is measured, and decided one way or the other.
#[test]
fn layers_are_really_measured() {
    let timings = LayerTimings::new().without_file();
    let timings = timings.with_budget(Duration::from_millis(1));
    let dir = tempfile::tempdir().unwrap();
    fp8_test_support::files::fp8_model(dir.path());
    let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
    let served = Computation::Served(checkpoint.layer_scheme("fc").unwrap());
    let mut kinds = vec![served];
    for name in RecipeName::ALL {
        kinds.push(Computation::training(name));
        kinds.push(Computation::evaluation(name));
    }
    // A guard that is open here takes no part.
    let guard = fp8_autocast("tensorwise").unwrap();
    for kind in kinds {
        for dtype in [DType::F32, DType::BF16] {
            let case = LayerCase::new(kind.clone(), (32, 64), 3).with_dtype(dtype);
            let timing = timings.get(&case, &CPU).unwrap();
            assert!(!timing.fp8.is_zero(), "{case}: {timing}");
            assert!(!timing.high_precision.is_zero(), "{case}: {timing}");
            assert_eq!(timings.get(&case, &CPU).unwrap(), timing, "{case}");
        }
    }
    assert_eq!(guard.close().unwrap().layers(), 0);
}

#[test]
fn a_checkpoint_is_decoded_where_codes_are_slower() {
    let dir = tempfile::tempdir().unwrap();
    fp8_test_support::files::fp8_model(dir.path());
    for (tokens, decoded) in [(1, true), (1000, false)] {
        let (timings, asked) = table();
        let mut checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
        let value = checkpoint.stored_layer("fc", &CPU).unwrap().codes;
        let value = value.dequantize(DType::F32).unwrap();
        let report =
            decode_where_faster(&mut checkpoint, tokens, DType::F32, &CPU, &timings).unwrap();
        assert_eq!(report.decoded(), usize::from(decoded));
        let text = report.to_string();
        let (line, sum) = match decoded {
            true => (
                "fc  [32, 64]  decoded: 0.101 ms against 0.002 ms",
                "0 in fp8, 1 decoded",
            ),
            false => (
                "fc  [32, 64]  fp8: 1.124 ms against 2.048 ms",
                "1 in fp8, 0 decoded",
            ),
        };
        assert_eq!(text, format!("{line}\n{sum}"));
        let scheme = checkpoint.layer_scheme("fc").unwrap();
        let case = LayerCase::new(Computation::Served(scheme), (32, 64), tokens);
        assert_eq!(*asked.lock().unwrap(), [case]);

        assert_eq!(checkpoint.is_decoded("fc"), decoded);
        let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
        let layer = nn::linear(64, 32, vb.pp("fc")).unwrap();
        assert_eq!(layer.static_weight().is_none(), decoded);
        let values = |x: &Tensor| x.to_vec2::<f32>().unwrap();
        assert_eq!(values(&layer.weight().unwrap()), values(&value));
        if decoded {
            let x = tensor(3, &[2, 64]);
            let plain = candle_nn::Linear::new(value, layer.bias().cloned());
            let y = layer.forward(&x).unwrap();
            assert_eq!(values(&y), values(&plain.forward(&x).unwrap()));
        }
    }
    let mut checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
    let error = checkpoint.decode("fd").unwrap_err().to_string();
    assert!(error.contains("fd.weight"), "{error}");
    assert!(!checkpoint.is_decoded("fd"));
}
