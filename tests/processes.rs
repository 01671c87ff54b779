//! Scales of ranks that are processes; `tests/ranks` tests the same on threads, and much more.

#[path = "ranks/two_models.rs"]
mod two_models;

use candle_core::Module;
use fp8::ranks::{GroupOptions, ProcessGroup, World, WorldOptions, threads};
use fp8_test_support::child::from_parent;
use fp8_test_support::mpirun::{HANGS, LAST_WORDS, mpirun, rank_passed, run};
use fp8_test_support::tensor;
use std::time::Duration;
use two_models::{all_ranks_abort, names_the_aborted_step, one_rank_aborts, open, train, two};

/// How soon a job has ended that does not wait for a deadline: most of it is the time in which the launcher ends the other ranks.
const SOON: Duration = Duration::from_secs(7);

fn join(deadline: Duration) -> World {
    let group = GroupOptions::default().with_deadline(deadline);
    World::join(WorldOptions::default().with_group(group)).expect("the others")
}

#[test]
fn a_step_that_one_rank_aborts_is_an_error_on_all() {
    for ranks in [2, 3] {
        let ended = run(&mut mpirun(ranks, "aborting_alone"), HANGS);
        assert!(ended.status.success(), "{}", ended.said);
        assert_eq!(ended.passed, ranks, "{}", ended.said);
    }
}

#[test]
#[ignore = "run by a_step_that_one_rank_aborts_is_an_error_on_all under mpirun"]
fn aborting_alone() {
    let world = join(HANGS);
    let (rank, ranks) = (world.group().rank(), world.group().size());
    let error = one_rank_aborts(world.group()).expect_err("an error");
    names_the_aborted_step(&error.to_string(), rank, ranks);
    world.finish().expect("the end");
    rank_passed(rank);
}

/// What the ranks do after a step that rank 1 has aborted alone, and what must be said: ranks and operation.
const ABORTED: [(&str, &[&str]); 2] = [
    (
        "they train",
        &[
            "of 2 of group \"world\": all_reduce_max of the amaxes",
            "rank 0: inputs and weights after 1 steps; rank 1: inputs and weights after 2 steps",
        ],
    ),
    // Nothing has met the amaxes of the others.
    (
        "they finish",
        &[
            "rank 1 of 2: finish of group \"world\": the ranks disagree: \
             rank 0 calls all_reduce_max of group \"world\"; rank 1 calls finish",
        ],
    ),
];

#[test]
fn a_job_ends_soon_after_one_rank_has_aborted_a_step() {
    for (then, expected) in ABORTED {
        let mut command = mpirun(2, "aborting_and_ending");
        let ended = run(command.env("FP8_THEN", then), HANGS);
        assert!(!ended.status.success(), "{then}: {}", ended.said);
        for text in expected {
            assert!(
                ended.said.contains(text),
                "{then}: no {text:?} in {}",
                ended.said
            );
        }
        assert!(
            ended.took < SOON,
            "{then}: {:?}: {}",
            ended.took,
            ended.said
        );
    }
}

#[test]
#[ignore = "run by a_job_ends_soon_after_one_rank_has_aborted_a_step under mpirun"]
fn aborting_and_ending() {
    // Longer than a rank may wait here.
    let world = join(2 * HANGS);
    let done = match from_parent("FP8_THEN").as_str() {
        "they train" => {
            println!("{LAST_WORDS}");
            one_rank_aborts(world.group())
        }
        _ => last_step_aborted(world.group()),
    };
    world
        .finish_with(done.map_err(Box::<dyn std::error::Error>::from))
        .expect("no end without an error");
}

/// A step of all ranks, and a last one that rank 1 aborts.
fn last_step_aborted(group: &ProcessGroup) -> fp8::Result<()> {
    let [a, b] = two();
    train(group, 0, &[&a, &b])?;
    let guard = open(group);
    a.linear.forward(&tensor(5, &[5, 8]))?;
    println!("{LAST_WORDS}");
    match group.rank() {
        1 => guard.abort(),
        _ => drop(guard.close()?),
    }
    Ok(())
}

/// The guard of rank 1 is dropped with the error, while rank 0 waits in a collective that is none of amaxes.
#[test]
fn a_job_ends_soon_after_an_error_of_one_rank_in_a_guard() {
    let ended = run(&mut mpirun(2, "failing_in_a_guard"), HANGS);
    assert!(!ended.status.success(), "{}", ended.said);
    let text = "rank 1 of 2 of group \"world\": the batch is damaged";
    assert!(ended.said.contains(text), "{}", ended.said);
}

#[test]
#[ignore = "run by a_job_ends_soon_after_an_error_of_one_rank_in_a_guard under mpirun"]
fn failing_in_a_guard() {
    // Longer than a rank may wait here.
    let world = join(2 * HANGS);
    let done = failing_step(world.group());
    world.finish_with(done).expect("no end without an error");
}

fn failing_step(group: &ProcessGroup) -> Result<(), Box<dyn std::error::Error>> {
    let [a, _] = two();
    let guard = open(group);
    a.linear.forward(&tensor(5, &[5, 8]))?;
    if group.rank() == 1 {
        return Err("the batch is damaged".into());
    }
    group.barrier()?;
    guard.close()?;
    Ok(())
}

#[test]
fn steps_that_all_ranks_abort_leave_no_trace() {
    let plain = threads::run(2, |group| all_ranks_abort(&group, false));
    let expected = format!("{:?}", plain[0]);
    let mut command = mpirun(2, "aborting_together");
    let ended = run(command.env("FP8_EXPECTED", expected), HANGS);
    assert!(ended.status.success(), "{}", ended.said);
    assert_eq!(ended.passed, 2, "{}", ended.said);
}

#[test]
#[ignore = "run by steps_that_all_ranks_abort_leave_no_trace under mpirun"]
fn aborting_together() {
    let world = join(HANGS);
    let rank = world.group().rank();
    let found = all_ranks_abort(world.group(), true);
    assert_eq!(format!("{found:?}"), from_parent("FP8_EXPECTED"));
    world.finish().expect("the end");
    rank_passed(rank);
}
