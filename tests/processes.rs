//! Scales of ranks that are processes; `tests/ranks` tests the same on threads, and much more.

#[path = "ranks/two_models.rs"]
mod two_models;

use fp8::ranks::threads;
use fp8::ranks::{GroupOptions, World, WorldOptions};
use fp8_test_support::child::from_parent;
use fp8_test_support::mpirun::{HANGS, mpirun, rank_passed, run};
use two_models::{all_ranks_abort, names_the_aborted_step, one_rank_aborts};

fn join() -> World {
    let group = GroupOptions::default().with_deadline(HANGS);
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
    let world = join();
    let rank = world.group().rank();
    let error = one_rank_aborts(world.group()).expect_err("an error");
    names_the_aborted_step(&error.to_string(), rank);
    world.finish().expect("the end");
    rank_passed(rank);
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
    let world = join();
    let rank = world.group().rank();
    let found = all_ranks_abort(world.group(), true);
    assert_eq!(format!("{found:?}"), from_parent("FP8_EXPECTED"));
    world.finish().expect("the end");
    rank_passed(rank);
}
