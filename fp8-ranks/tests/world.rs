//! A job of one process, and launchers that say something else.

use fp8_ranks::threads::Threads;
use fp8_ranks::{Error, GroupOptions, SumOrder, World, WorldOptions};
use fp8_test_support::child::child;
use std::time::Duration;

#[test]
fn without_a_launcher_there_is_one_rank() {
    let world = World::join(WorldOptions::default()).expect("a world");
    let group = world.group();
    assert_eq!((group.rank(), group.size(), group.name()), (0, 1, "world"));
    assert_eq!(group.engine(), "one process");
    group.barrier().expect("barrier");
    world.finish().expect("the end");
    // Nobody waits for it, so nothing has to be finished, and errors are only errors.
    drop(World::join(WorldOptions::default()).expect("a world"));
    let world = World::join(WorldOptions::default()).expect("a world");
    let result = world.finish_with::<(), Box<dyn std::error::Error>>(Err("of the work".into()));
    assert_eq!(result.expect_err("an error").to_string(), "of the work");
    let world = World::join(WorldOptions::default()).expect("a world");
    assert_eq!(
        world
            .finish_with::<_, Error>(Ok(3))
            .expect("the work's result"),
        3
    );
}

/// Without the feature each process that mpirun starts would think that it is alone.
#[cfg(not(feature = "mpi"))]
#[test]
fn a_launcher_needs_the_feature() {
    let output = child("joining").env("OMPI_COMM_WORLD_SIZE", "2").output();
    let output = output.expect("a child process");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    let text = "OMPI_COMM_WORLD_SIZE=2 says that a launcher started 2 processes, but this process is in a group of 1: \
                build the program with the feature `mpi`, or start it without a launcher";
    assert!(said.contains(text), "{said}");
}

/// A launcher of one process, or a batch script of Slurm.
#[test]
fn a_launcher_of_one_process_is_no_launcher() {
    for variables in [
        &[("OMPI_COMM_WORLD_SIZE", "1")][..],
        &[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")],
    ] {
        let output = child("joining").envs(variables.iter().copied()).output();
        let output = output.expect("a child process");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{variables:?}: {said}"
        );
    }
}

#[test]
fn a_launcher_with_a_strange_value_is_refused() {
    let output = child("joining").env("PMI_SIZE", "many").output();
    let output = output.expect("a child process");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("PMI_SIZE=\"many\": expected the number of processes"),
        "{said}"
    );
}

#[test]
#[ignore = "run by the tests above in a child process"]
fn joining() {
    let world = World::join(WorldOptions::default());
    let world = world.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(world.group().size(), 1);
    world.finish().expect("the end");
}

#[test]
fn options_have_the_documented_defaults() {
    let options = WorldOptions::default();
    assert_eq!(options.group.deadline, Duration::from_secs(10 * 60));
    assert_eq!(options.group.sum_order, SumOrder::Ranks);
    assert!(options.end_on_panic);
    // MPI counts elements with 32 bits.
    let largest = i32::MAX as usize;
    assert_eq!(options.largest_message, largest);
    for (given, taken) in [(0, 1), (1, 1), (7, 7), (usize::MAX, largest)] {
        assert_eq!(options.with_largest_message(given).largest_message, taken);
    }
}

/// Nobody waits for the only rank: `end_on_panic` is for jobs of several.
#[test]
fn a_panic_of_the_only_rank_ends_no_process() {
    let world = World::join(WorldOptions::default()).expect("a world");
    assert!(std::panic::catch_unwind(|| panic!("a bug")).is_err());
    world.finish().expect("the end");
}

/// Also those of groups of threads, and of groups within groups.
#[test]
fn groups_have_the_options_that_they_were_given() {
    let options = GroupOptions::default().with_deadline(Duration::from_secs(7));
    let world = World::join(WorldOptions::default().with_group(options)).expect("a world");
    assert_eq!(world.group().options(), options);
    for (job, expected) in [
        (Threads::new(2), GroupOptions::default()),
        (Threads::new(2).with_options(options), options),
    ] {
        for result in job.run(|group| {
            let part = group.split(Some(0), 0, "part").expect("groups");
            (group.options(), part.expect("a group").options())
        }) {
            assert_eq!(result.expect("no panic"), (expected, expected));
        }
    }
}
