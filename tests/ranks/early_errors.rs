//! An error or an early end of one rank alone ends the others at once, wherever they wait for it. The deadline is that of minutes which
//! groups have by default: a rank that waits for it makes these tests as long, and fails them, because it names no reason.

use crate::two_models::{open, train, two};
use anyhow::{Result, ensure};
use candle_core::{DType, Device};
use candle_nn::{Init, VarBuilder, VarMap};
use fp8::nn::{self, column_parallel_linear, row_parallel_linear};
use fp8::optim::{DataParallel, DataParallelOptions};
use fp8::ranks::threads::{Threads, finish};
use fp8::ranks::{DeviceMesh, ProcessGroup, ShardedVarMap};
use fp8::{PrepareOptions, prepare_fp8};
use fp8_test_support::cpu_tensor;

/// Where a step of [`Work`] may fail, inside its guard: before its layers compute, or after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Batch,
    Loss,
}

/// Code of the user in a step of this number.
type Check<'a> = &'a dyn Fn(u64, Place) -> Result<()>;

/// Three steps under delayed scaling, whose amaxes are those of all ranks.
type Work = fn(&ProcessGroup, Check<'_>) -> Result<()>;

fn data_parallel(group: &ProcessGroup, check: Check<'_>) -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = nn::linear(16, 8, vb.pp("fc"))?;
    prepare_fp8(&model, &PrepareOptions::default())?;
    let mut parallel = DataParallel::new(group, &vars, DataParallelOptions::default())?;
    for step in 0..3 {
        let guard = open(group);
        check(step, Place::Batch)?;
        let y = model.try_forward(&cpu_tensor(step, &[4, 16]))?;
        check(step, Place::Loss)?;
        parallel.backward(&y.sqr()?.mean_all()?)?;
        guard.close()?;
    }
    Ok(())
}

fn sharded(group: &ProcessGroup, check: Check<'_>) -> Result<()> {
    let map = ShardedVarMap::new(group, &Device::Cpu);
    let model = nn::linear(16, 8, map.var_builder().pp("fc"))?;
    prepare_fp8(&model, &PrepareOptions::default())?;
    for step in 0..3 {
        let guard = open(group);
        check(step, Place::Batch)?;
        let y = model.try_forward(&cpu_tensor(step, &[4, 16]))?;
        check(step, Place::Loss)?;
        fp8::backward(&y.sqr()?.mean_all()?)?;
        guard.close()?;
    }
    Ok(())
}

fn tensor_parallel(group: &ProcessGroup, check: Check<'_>) -> Result<()> {
    let mesh = DeviceMesh::new(group, &[("model", group.size())])?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let up = column_parallel_linear(16, 48, vb.pp("up"), &mesh, "model")?;
    let down = row_parallel_linear(48, 16, vb.pp("down"), &mesh, "model")?;
    for layer in [&up, &down] {
        prepare_fp8(layer, &PrepareOptions::default())?;
    }
    for step in 0..3 {
        let guard = open(group);
        check(step, Place::Batch)?;
        let y = down.try_forward(&up.try_forward(&cpu_tensor(step, &[4, 16]))?)?;
        check(step, Place::Loss)?;
        fp8::backward(&y.sqr()?.mean_all()?)?;
        guard.close()?;
    }
    Ok(())
}

const WORK: [(&str, Work); 3] = [
    ("data parallel", data_parallel),
    ("sharded", sharded),
    ("tensor parallel", tensor_parallel),
];

/// The guard of the rank that fails is dropped by `?`, while the others wait in collectives of layers and gradients, not of amaxes.
#[test]
fn an_error_in_a_step_of_one_rank_ends_the_others() {
    for (name, work) in WORK {
        for step in [0, 2] {
            for place in [Place::Batch, Place::Loss] {
                let results = Threads::new(3).run(|group| {
                    let rank = group.rank();
                    work(&group, &|now, here| {
                        let fails = rank == 1 && (now, here) == (step, place);
                        ensure!(!fails, "the batch is damaged");
                        Ok(())
                    })
                });
                for (rank, result) in results.into_iter().enumerate() {
                    let error = result.expect("no panic").expect_err("an error");
                    let error = format!("{error:#}");
                    let expected = match rank {
                        1 => "the batch is damaged",
                        _ => "rank 1 failed: it has left the job",
                    };
                    assert!(
                        error.contains(expected),
                        "{name}, step {step}, {place:?}, rank {rank}: {error}"
                    );
                }
            }
        }
    }
}

/// What the test above leaves out of each step breaks nothing.
#[test]
fn without_an_error_all_ranks_come_to_the_end() {
    for (name, work) in WORK {
        for result in Threads::new(3).run(|group| work(&group, &|_, _| Ok(()))) {
            if let Err(error) = result.expect("no panic") {
                panic!("{name}: {error:#}");
            }
        }
    }
}

/// Rank 0 has the initial values of all, and cannot make them.
#[test]
fn initial_values_that_cannot_be_made_are_an_error_on_all() {
    let results = Threads::new(3).run(|group| -> Result<()> {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let init = Init::Randn {
            mean: 0.,
            stdev: f64::INFINITY,
        };
        map.var_builder().get_with_hints((16, 8), "weight", init)?;
        Ok(())
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect("no panic").expect_err("an error");
        let error = format!("{error:#}");
        assert!(error.contains("rank 0"), "rank {rank}: {error}");
    }
}

/// Rank 1 has a step less: it is at its end while the others wait for its amaxes.
#[test]
fn a_rank_with_fewer_steps_is_an_error_on_all() {
    let results = Threads::new(3).run(|group| -> Result<()> {
        let [a, b] = two();
        let steps = if group.rank() == 1 { 2 } else { 3 };
        for step in 0..steps {
            train(&group, step, &[&a, &b])?;
        }
        Ok(finish(&group)?)
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect("no panic").expect_err("an error");
        let error = format!("{error:#}");
        for text in [
            "the ranks disagree: ",
            " calls all_reduce_max of group \"world\" with ",
            "rank 1 calls finish",
        ] {
            assert!(error.contains(text), "rank {rank}: no {text:?} in {error}");
        }
    }
}
