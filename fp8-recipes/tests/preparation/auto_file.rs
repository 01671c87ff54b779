//! The file of times: what is found there is not measured again, and no content of it does harm.

use crate::auto::{micros, table};
use candle_core::Device;
use fp8_recipes::timings::{Computation, LayerCase, LayerTiming, LayerTimings};
use fp8_recipes::{PrepareOptions, RecipeName, nn, prepare_fp8};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Duration;

const CPU: Device = Device::Cpu;

fn case(tokens: usize) -> LayerCase {
    LayerCase::new(Computation::training(RecipeName::Delayed), (16, 8), tokens)
}

/// The time that a fresh object gives, with the file and a clock that says `measured`; and its warnings.
fn get(file: &Path, tokens: usize, measured: LayerTiming) -> (LayerTiming, Vec<String>) {
    let timings = LayerTimings::new().with_file(file);
    let timings = timings.with_clock(move |_, _| Ok(measured));
    (
        timings.get(&case(tokens), &CPU).unwrap(),
        timings.warnings(),
    )
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn times_are_found_again() {
    let dir = tempfile::tempdir().unwrap();
    // The folder is made.
    let file = dir.path().join("cache/fp8/times.json");
    let (first, second) = (micros(10, 20), micros(30, 20));
    assert_eq!(get(&file, 1, first), (first, vec![]));
    assert_eq!(get(&file, 2, second), (second, vec![]));
    assert_eq!(get(&file, 1, second), (first, vec![]), "found");
    // Another dtype, recipe or kind of call is another case.
    let timings = LayerTimings::new()
        .with_file(&file)
        .with_clock(|_, _| Ok(micros(1, 2)));
    let others = [
        case(1).with_dtype(candle_core::DType::BF16),
        LayerCase::new(Computation::training(RecipeName::Rowwise), (16, 8), 1),
        LayerCase::new(Computation::evaluation(RecipeName::Delayed), (16, 8), 1),
        LayerCase::new(Computation::training(RecipeName::Delayed), (8, 16), 1),
        // The settings of a recipe count, whether its text has them or not.
        LayerCase::new(
            Computation::training(fp8_recipes::DelayedScaling::default().with_amax_history_len(2)),
            (16, 8),
            1,
        ),
    ];
    for other in &others {
        assert_eq!(timings.get(other, &CPU).unwrap(), micros(1, 2), "{other}");
    }
    let content = json(&file);
    let machines = content["machines"].as_object().unwrap();
    let cases: Vec<_> = machines.values().collect();
    assert_eq!(cases.len(), 1);
    assert_eq!(cases[0].as_object().unwrap().len(), 2 + others.len());
    let stored = &cases[0]["linear 16x8, 1 tokens, f32, training delayed"];
    let expected =
        serde_json::json!({ "fp8_ns": 10_000, "high_precision_ns": 20_000, "fp8_pays": true });
    assert_eq!(*stored, expected);
}

/// The processor, its instruction set, the number of threads and the version are in the name of a machine.
#[test]
fn times_of_another_machine_or_version_are_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("times.json");
    let (theirs, ours) = (micros(10, 20), micros(30, 20));
    get(&file, 1, theirs);
    let text = fs::read_to_string(&file).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let isa = fp8_core::Isa::best().level().name();
    let threads = format!("{} threads", rayon::current_num_threads());
    for (of_ours, of_theirs) in [
        (format!("fp8 {version}"), "fp8 0.0.9"),
        (format!(", {isa},"), ", sse9,"),
        (threads, "77 threads"),
    ] {
        assert!(text.contains(&of_ours), "{of_ours}: {text}");
        fs::write(&file, text.replacen(&of_ours, of_theirs, 1)).unwrap();
        assert_eq!(get(&file, 1, ours), (ours, vec![]), "{of_theirs}");
        // Both are kept.
        let machines = json(&file);
        let machines = machines["machines"].as_object().unwrap();
        assert_eq!(machines.len(), 2, "{of_theirs}: {machines:?}");
    }
}

#[test]
fn a_file_that_is_not_one_of_times_is_named_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("times.json");
    let ours = micros(30, 20);
    get(&file, 1, ours);
    let good = fs::read_to_string(&file).unwrap();
    for (content, part) in [
        ("".to_string(), "EOF"),
        ("{".to_string(), "EOF"),
        ("[1, 2]".to_string(), "expected a string"),
        ("a diary".to_string(), "expected value"),
        (
            good.replace("timings 1", "timings 2"),
            "expected `fp8 layer timings 1`",
        ),
        (good.replace("machines", "people"), "unknown field `people`"),
        (good.replace("30000", "-3"), "invalid value"),
        (
            good.replace("30000", "99999999999999999999999"),
            "invalid type",
        ),
        (good.replace("fp8_ns", "ns"), "unknown field `ns`"),
        (good[..good.len() - 9].to_string(), "EOF"),
    ] {
        fs::write(&file, &content).unwrap();
        let (timing, warnings) = get(&file, 1, ours);
        assert_eq!(timing, ours, "{content}");
        let [warning] = warnings.as_slice() else {
            panic!("{content}: {warnings:?}");
        };
        assert!(warning.contains("times.json"), "{warning}");
        assert!(warning.contains(part), "{content}: {warning}");
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
    }
    fs::write(&file, [0xFF, 0xFE]).unwrap();
    assert!(get(&file, 1, ours).1[0].contains("utf-8"));
    // Not a file, and no folder that could hold one.
    for path in [dir.path().to_path_buf(), file.join("below/times.json")] {
        let (timing, warnings) = get(&path, 1, ours);
        assert_eq!((timing, warnings.len()), (ours, 1), "{warnings:?}");
        let name = dir.path().to_string_lossy();
        assert!(warnings[0].contains(&*name), "{warnings:?}");
    }
}

#[test]
fn the_report_has_the_warning() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("times.json");
    fs::write(&file, "a diary").unwrap();
    let weight = candle_core::Tensor::ones((16, 8), candle_core::DType::F32, &CPU).unwrap();
    let layer = nn::Linear::new(weight, None).with_path("fc");
    let (timings, asked) = table();
    let options = PrepareOptions::auto("delayed".parse::<RecipeName>().unwrap(), 9);
    let options = options.with_timings(timings.with_file(&file));
    for _ in 0..2 {
        let report = prepare_fp8(&layer, &options).unwrap();
        let [warning] = report.warnings.as_slice() else {
            panic!("{:?}", report.warnings);
        };
        let line = format!("\nwarning: {warning}\n");
        assert!(report.to_string().contains(&line), "{report}");
    }
    assert_eq!(asked.lock().unwrap().len(), 1, "known in memory");
}

/// Each object stands for a process: they share the file alone.
#[test]
fn processes_that_write_at_the_same_time_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("times.json");
    std::thread::scope(|scope| {
        for process in 0..4 {
            let file = &file;
            scope.spawn(move || {
                for i in 1..=10 {
                    let tokens = process * 100 + i;
                    let timing = micros(tokens as u64, 7);
                    assert_eq!(get(file, tokens, timing), (timing, vec![]));
                }
            });
        }
    });
    for process in 0..4 {
        for i in 1..=10 {
            let tokens = process * 100 + i;
            let found = get(&file, tokens, micros(9999, 9999));
            assert_eq!(found, (micros(tokens as u64, 7), vec![]));
        }
    }
}

#[test]
fn a_measurement_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("times.json");
    let timings = LayerTimings::new().with_file(&file);
    assert_eq!(timings.file(), Some(file.as_path()));
    let timings = timings.with_budget(Duration::from_millis(1));
    let timing = timings.get(&case(3), &CPU).unwrap();
    assert_eq!(get(&file, 3, micros(9999, 9999)), (timing, vec![]));
    // Nothing is written without a file.
    let before = fs::read_to_string(&file).unwrap();
    let timings = timings.without_file();
    timings.get(&case(5), &CPU).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    assert_eq!(timings.file(), None);
}

/// Under `$XDG_CACHE_HOME` or `~/.cache` on Linux. Where there is no such folder, times are kept in memory.
#[test]
fn the_file_is_in_the_folder_for_caches_by_default() {
    let timings = LayerTimings::new();
    if let Some(file) = timings.file() {
        assert!(file.ends_with("fp8/layer_timings.json"), "{file:?}");
        assert!(file.is_absolute(), "{file:?}");
    }
    assert_eq!(LayerTimings::new().without_file().file(), None);
}

/// The file of all programs has what this machine measured, and no clock's times.
#[test]
fn times_of_a_clock_are_kept_only_in_a_file_that_is_named() {
    let clock = |_: &LayerCase, _: &Device| Ok(micros(10, 20));
    assert_eq!(LayerTimings::new().with_clock(clock).file(), None);
    let named = LayerTimings::new()
        .with_file("times.json")
        .with_clock(clock);
    assert_eq!(named.file(), Some(Path::new("times.json")));
    // Times that are known without the clock are not its own; and it may ask the object that it was made from.
    let without = LayerTimings::new().without_file();
    let slow = without.clone().with_clock(|_, _| Ok(micros(30, 20)));
    assert_eq!(slow.get(&case(1), &CPU).unwrap(), micros(30, 20));
    let other = slow.clone().with_clock(move |case, device| {
        assert_eq!(slow.get(case, device)?, micros(30, 20));
        Ok(micros(10, 20))
    });
    assert_eq!(other.get(&case(1), &CPU).unwrap(), micros(10, 20));
}
