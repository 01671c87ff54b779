//! Checkpoints of ranks that share a batch.

use crate::training::{State, Training};
use fp8::checkpoint::{TrainingMeta, gather_state, resume_training, save_training};
use fp8::optim::{DataParallel, DataParallelOptions};
use fp8::ranks::{ProcessGroup, threads};
use std::path::Path;

const RANKS: usize = 2;

/// A rank and its run.
struct Rank {
    training: Training,
    parallel: DataParallel,
}

impl Rank {
    fn new(group: &ProcessGroup, recipe: &str) -> Self {
        let training = Training::new(Some(recipe)).unwrap();
        let options = DataParallelOptions::default();
        let parallel = DataParallel::new(group, &training.vars, options).unwrap();
        Self { training, parallel }
    }

    fn steps(&mut self, steps: std::ops::Range<usize>) -> Vec<f32> {
        let steps = steps.map(|step| self.training.step_of_rank(step, &mut self.parallel));
        steps.map(Result::unwrap).collect()
    }
}

/// The losses of steps 3 to 5, and the state after them.
fn rest(rank: &mut Rank) -> (Vec<f32>, State) {
    (rank.steps(3..6), rank.training.state().unwrap())
}

/// Three steps, then the state of all ranks in a file.
fn save(rank: &mut Rank, group: &ProcessGroup, path: &Path) {
    rank.steps(0..3);
    let Training {
        vars,
        gpt,
        optimizer,
        recipe,
    } = &rank.training;
    gather_state(gpt, group).unwrap();
    if group.rank() == 0 {
        let meta = TrainingMeta {
            step: 3,
            recipe: recipe.clone(),
            random: serde_json::Value::Null,
            extra: serde_json::Value::Null,
        };
        save_training(path, gpt, vars, optimizer, &meta).unwrap();
    }
}

fn resume(rank: &mut Rank, path: &Path) {
    let Training {
        vars,
        gpt,
        optimizer,
        recipe,
    } = &mut rank.training;
    resume_training(path, gpt, vars, optimizer, recipe.as_ref()).unwrap();
}

/// The recipe that rounds gradients stochastically too: each rank goes on with its own draws, although one of them has saved.
#[test]
fn resumed_ranks_repeat_every_loss() {
    for recipe in ["delayed", "hybrid", "direct"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.safetensors");
        let expected = threads::run(RANKS, |group| {
            let mut rank = Rank::new(&group, recipe);
            save(&mut rank, &group, &path);
            rest(&mut rank)
        });
        let got = threads::run(RANKS, |group| {
            let mut rank = Rank::new(&group, recipe);
            resume(&mut rank, &path);
            rest(&mut rank)
        });
        for (rank, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got.0, expected.0, "{recipe}, rank {rank}: losses");
            assert_eq!(got.1.len(), expected.1.len(), "{recipe}, rank {rank}");
            for (name, expected) in &expected.1 {
                // Counts of Inf and NaN are those of the rank that saved.
                let is_count = name.contains("non_finite");
                assert!(
                    is_count || got.1[name] == *expected,
                    "{recipe}, rank {rank}: {name}"
                );
            }
        }
    }
}
