//! Checkpoints of parameters in parts: any number of ranks reads them.

use crate::sharding::Sharded;
use crate::training::State;
use crate::training::{Training, adamw};
use candle_core::Device;
use fp8::Recipe;
use fp8::checkpoint::{resume_sharded, resume_training, save_gathered, save_sharded};
use fp8::optim::{AdamW, Sgd, SgdConfig};
use fp8::ranks::threads::{self, Fault, Threads};
use fp8::ranks::{ProcessGroup, ShardedVarMap};
use std::path::Path;
use std::time::Duration;

fn recipe(name: Option<&str>) -> Option<Recipe> {
    name.map(|name| name.parse().unwrap())
}

/// Trains and saves; the state on rank 0.
fn save(dir: &Path, ranks: usize, name: Option<&str>, steps: usize) -> State {
    let states = threads::run(ranks, |group| {
        let mut training = Sharded::new(&group, recipe(name)).unwrap();
        for step in 0..steps {
            training.step(step).unwrap();
        }
        let Sharded {
            map,
            gpt,
            optimizer,
            ..
        } = &training;
        save_sharded(dir, gpt, map, optimizer, &training.meta()).unwrap();
        training.state().unwrap()
    });
    states.into_iter().next().unwrap()
}

fn resumed(group: &ProcessGroup, dir: &Path, name: Option<&str>) -> fp8::Result<Sharded> {
    let mut training = Sharded::new(group, recipe(name)).unwrap();
    let own = recipe(name);
    let Sharded {
        map,
        gpt,
        optimizer,
        ..
    } = &mut training;
    resume_sharded(dir, gpt, map, optimizer, own.as_ref())?;
    Ok(training)
}

#[test]
fn four_ranks_save_and_any_number_resumes() {
    for name in [None, Some("delayed"), Some("hybrid")] {
        let dir = tempfile::tempdir().unwrap();
        let saved = save(dir.path(), 4, name, 3);
        assert!(saved.len() > 80);
        for ranks in [1, 2, 4] {
            let states = threads::run(ranks, |group| {
                resumed(&group, dir.path(), name).unwrap().state().unwrap()
            });
            assert!(states[0] == saved, "{name:?} on {ranks}");
        }
    }
}

/// The run goes on as if it had not been interrupted, also where gradients are rounded stochastically.
#[test]
fn a_resumed_run_repeats_every_loss() {
    for name in ["delayed", "hybrid"].map(Some) {
        let dir = tempfile::tempdir().unwrap();
        let losses = |from: usize, mut training: Sharded| -> (Vec<f32>, State) {
            let losses = (from..from + 3).map(|step| training.step(step).unwrap());
            (losses.collect(), training.state().unwrap())
        };
        save(dir.path(), 2, name, 3);
        let expected = threads::run(2, |group| {
            let mut training = Sharded::new(&group, recipe(name)).unwrap();
            for step in 0..3 {
                training.step(step).unwrap();
            }
            losses(3, training)
        });
        let got = threads::run(2, |group| {
            losses(3, resumed(&group, dir.path(), name).unwrap())
        });
        assert!(got == expected, "{name:?}");
    }
}

/// A gathered file is an ordinary training checkpoint.
#[test]
fn one_process_resumes_from_a_gathered_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("whole.safetensors");
    let name = Some("delayed");
    let states = threads::run(2, |group| {
        let mut training = Sharded::new(&group, recipe(name)).unwrap();
        for step in 0..3 {
            training.step(step).unwrap();
        }
        let Sharded {
            map,
            gpt,
            optimizer,
            ..
        } = &training;
        save_gathered(&path, gpt, map, optimizer, &training.meta()).unwrap();
        training.state().unwrap()
    });
    let mut whole = Training::new(name).unwrap();
    let own = recipe(name);
    let Training {
        gpt,
        vars,
        optimizer,
        ..
    } = &mut whole;
    resume_training(&path, gpt, vars, optimizer, own.as_ref()).unwrap();
    assert!(whole.state().unwrap() == states[0]);
}

/// A save that ends early leaves the checkpoint before it, or the new one: never a mixture.
#[test]
fn an_interrupted_save_leaves_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let old = save(dir.path(), 2, None, 1);
    let read = || {
        let states = threads::run(2, |group| {
            resumed(&group, dir.path(), None).unwrap().state().unwrap()
        });
        states.into_iter().next().unwrap()
    };
    // Saves a fresh model; rank 1 fails at one of its collectives.
    let fails = |dir: &Path, at: usize| {
        let job = Threads::new(2).with_deadline(Duration::from_secs(120));
        let job = job.with_fault(1, at, Fault::Error);
        let results = job.run(|group| -> anyhow::Result<()> {
            let training = Sharded::new(&group, None)?;
            let Sharded {
                map,
                gpt,
                optimizer,
                ..
            } = &training;
            Ok(save_sharded(dir, gpt, map, optimizer, &training.meta())?)
        });
        results.into_iter().any(|result| result.unwrap().is_err())
    };
    // How many collectives there are.
    let elsewhere = tempfile::tempdir().unwrap();
    let (mut low, mut high) = (0, 1 << 12);
    while low < high {
        let middle = (low + high) / 2;
        match fails(elsewhere.path(), middle) {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    // The last one is the barrier after the index, the one before it that before the index.
    for before in (2..8).rev() {
        assert!(fails(dir.path(), low - before));
        assert!(read() == old, "{before} before the end");
    }
    assert!(fails(dir.path(), low - 1));
    let after = read();
    let new = || {
        let states = threads::run(2, |group| {
            Sharded::new(&group, None).unwrap().state().unwrap()
        });
        states.into_iter().next().unwrap()
    };
    assert!(after == old || after == new());
    assert!(!fails(dir.path(), low));
    assert!(read() == new());
    // Nothing of earlier saves is left.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, Some("delayed"), 1);
    let error = |name: Option<&str>| {
        let errors = threads::run(2, |group| {
            resumed(&group, dir.path(), name).err().unwrap().to_string()
        });
        errors.into_iter().next().unwrap()
    };
    assert!(error(Some("tensorwise")).contains("the recipe"));
    // Another optimizer.
    let errors = threads::run(2, |group| {
        let training = Sharded::new(&group, recipe(Some("delayed"))).unwrap();
        let mut sgd = Sgd::from_sharded(&training.map, SgdConfig::default()).unwrap();
        let Sharded {
            map, gpt, recipe, ..
        } = &training;
        let error = resume_sharded(dir.path(), gpt, map, &mut sgd, recipe.as_ref());
        error.unwrap_err().to_string()
    });
    assert!(
        errors.iter().any(|error| error.contains("AdamW")),
        "{errors:?}"
    );
    // Other parameters.
    let errors = threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let model = fp8::nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
        let mut optimizer = AdamW::from_sharded(&map, adamw()).unwrap();
        let error = resume_sharded(dir.path(), &model, &map, &mut optimizer, None);
        error.unwrap_err().to_string()
    });
    assert!(
        errors.iter().any(|error| error.contains("parameter `")),
        "{errors:?}"
    );
    // A file is gone; the index is damaged; there is none.
    let mut files: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .collect();
    assert_eq!(files.len(), 2);
    files.sort();
    std::fs::remove_file(&files[1]).unwrap();
    assert!(error(Some("delayed")).contains("rank-1-of-2"));
    let index = dir.path().join("index.json");
    for bad in [
        "{",
        r#"{"version":9,"files":["a"],"parameters":{}}"#,
        r#"{"version":1,"files":[],"parameters":{}}"#,
        r#"{"version":1,"files":["../a"],"parameters":{}}"#,
        r#"{"version":1,"files":["a"],"parameters":{"w":{"shape":[4],"counts":[3]}}}"#,
        r#"{"version":1,"files":["a"],"parameters":{"w":{"shape":[9223372036854775807,4],"counts":[3]}}}"#,
    ] {
        std::fs::write(&index, bad).unwrap();
        assert!(error(Some("delayed")).contains("index.json"), "{bad}");
    }
    std::fs::remove_file(&index).unwrap();
    assert!(error(Some("delayed")).contains("index.json"));
}
