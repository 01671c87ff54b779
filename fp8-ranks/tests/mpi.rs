//! Ranks as processes: this program starts itself under `mpirun`.

mod cases;

use fp8_ranks::{
    GroupOptions, ProcessGroup, ReduceOp, ReductionGroup, Result, World, WorldOptions,
};
use fp8_test_support::child::{child, from_parent};
use fp8_test_support::mpirun::{HANGS, LAST_WORDS, launcher_is_open_mpi, mpirun, rank_passed, run};
use std::process::Command;
use std::time::Duration;

/// How long ranks wait for each other where one does not come.
const DEADLINE: Duration = Duration::from_secs(2);
#[test]
fn every_case_on_one_to_four_ranks() {
    for ranks in 1..=4 {
        let ended = run(
            mpirun(ranks, "every_case").env("FP8_RANKS_SIZE", ranks.to_string()),
            HANGS,
        );
        assert!(ended.status.success(), "{ranks} ranks: {}", ended.said);
        assert_eq!(ended.passed, ranks, "{}", ended.said);
    }
}

/// Data that are longer than a call of MPI may be go in several.
#[test]
fn every_case_in_many_messages() {
    for ranks in [2, 3] {
        let mut command = mpirun(ranks, "every_case");
        command.env("FP8_RANKS_SIZE", ranks.to_string());
        let ended = run(command.env("FP8_RANKS_LARGEST", "1000"), HANGS);
        assert!(ended.status.success(), "{ranks} ranks: {}", ended.said);
        assert_eq!(ended.passed, ranks, "{}", ended.said);
    }
}

#[test]
#[ignore = "run by the tests above under mpirun"]
fn every_case() {
    let largest = std::env::var("FP8_RANKS_LARGEST").ok();
    let largest = largest.map_or(usize::MAX, |text| text.parse().expect("a number"));
    let options = WorldOptions::default().with_deadline(HANGS);
    let world = World::join(options.with_largest_message(largest)).expect("the others");
    let group = world.group();
    assert_eq!(group.size().to_string(), from_parent("FP8_RANKS_SIZE"));
    assert_eq!(
        group.engine(),
        if group.size() > 1 {
            "MPI"
        } else {
            "one process"
        }
    );
    for (name, case) in cases::CASES {
        if group.rank() == 0 {
            println!("{name}");
        }
        case(group);
    }
    let rank = group.rank();
    world.finish().expect("the end");
    rank_passed(rank);
}

/// How rank 1 of 3 leaves the others, and what must then be said: the rank, and the operation where anybody can know it.
const DEATHS: [(&str, &[&str]); 10] = [
    ("kill", &["rank 1 ", "signal 9"]),
    (
        "panic",
        &[
            "rank 1 of 3: after all_reduce of group \"world\"",
            "panicked",
            "a bug",
        ],
    ),
    (
        "panic_elsewhere",
        &["rank 1 of 3: after all_reduce of group \"world\" thread \"loader\" panicked"],
    ),
    // Without the hook of `end_on_panic` the panic unwinds, and drops the `World`.
    (
        "panic_unwinds",
        &[
            "rank 1 of 3: after all_reduce of group \"world\" its `World` was dropped without `finish`",
            "a bug",
        ],
    ),
    (
        "question_mark",
        &[
            "rank 1 of 3: after all_reduce of group \"world\" its `World` was dropped without `finish`",
        ],
    ),
    (
        "early_return",
        &[
            "rank 1 of 3: after all_reduce of group \"world\" its `World` was dropped without `finish`",
        ],
    ),
    ("error", &["rank 1 of 3 of group \"world\": no such file"]),
    (
        "stuck",
        &["of 3: all_reduce of group \"world\": no answer within 2s"],
    ),
    (
        "elsewhere",
        &["of 3: ", "of group \"world\": no answer within 2s"],
    ),
    (
        "argument",
        &["rank 1 of 3: all_reduce of group \"world\": a tensor of U8, expected F32"],
    ),
];

#[test]
fn a_job_ends_soon_after_any_rank_has_left_it() {
    for (death, expected) in DEATHS {
        let ended = run(mpirun(3, "dying").env("FP8_RANKS_DEATH", death), HANGS);
        println!("{death}: {:?} after {:?}", ended.status.code(), ended.took);
        assert!(!ended.status.success(), "{death}: {}", ended.said);
        // A killed process says nothing itself, and MPICH's mpirun names no rank.
        let named = death != "kill" || launcher_is_open_mpi();
        for text in expected.iter().filter(|_| named) {
            assert!(
                ended.said.contains(text),
                "{death}: no {text:?} in {}",
                ended.said
            );
        }
        // What is promised: without an end the others would wait for ever.
        let promised = DEADLINE + Duration::from_secs(5);
        assert!(
            ended.took < promised,
            "{death}: {:?}: {}",
            ended.took,
            ended.said
        );
    }
}

#[test]
#[ignore = "run by a_job_ends_soon_after_any_rank_has_left_it under mpirun"]
fn dying() {
    // The end of a test is that of `main` here: it gives an error to whoever started it.
    work(&from_parent("FP8_RANKS_DEATH")).expect("no error");
    std::process::exit(0);
}

fn sum(group: &ProcessGroup) -> Result<()> {
    let own = candle_core::Tensor::new(&[1f32; 100], &candle_core::Device::Cpu).expect("a tensor");
    group.all_reduce(&own, ReduceOp::Sum)?;
    group.all_reduce_max(&own).expect("all_reduce_max");
    group.all_reduce(&own, ReduceOp::Max).map(drop)
}

fn work(death: &str) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let options = WorldOptions::default()
        .with_group(GroupOptions::default().with_deadline(DEADLINE))
        .with_end_on_panic(death != "panic_unwinds");
    let world = World::join(options)?;
    let group = world.group();
    for _ in 0..50 {
        sum(group)?;
    }
    if group.rank() == 1 {
        println!("{LAST_WORDS}");
        match death {
            "kill" => {
                let own = std::process::id().to_string();
                Command::new("kill").args(["-9", &own]).status()?;
            }
            "panic" | "panic_unwinds" => panic!("a bug"),
            "panic_elsewhere" => {
                let loader = std::thread::Builder::new().name("loader".to_owned());
                let loader = loader.spawn(|| panic!("a bug"))?;
                loader.join().expect("it ends the process");
            }
            "question_mark" => {
                std::fs::read("/there is no such file")?;
            }
            "early_return" => return Ok(()),
            "error" => return world.finish_with(Err("no such file".into())),
            "stuck" => std::thread::sleep(HANGS),
            "elsewhere" => {
                group.broadcast_bytes(Some(b"what the others do not wait for"), 1)?;
            }
            "argument" => {
                let codes = candle_core::Tensor::new(&[1u8; 100], &candle_core::Device::Cpu)?;
                group.all_reduce(&codes, ReduceOp::Sum)?;
            }
            other => panic!("no death {other:?}"),
        }
    }
    loop {
        sum(group)?;
    }
}

/// Where other ranks wait for rank 1 of 3, which has come to its end, and what must be said.
const EARLY_ENDS: [(&str, &[&str]); 4] = [
    (
        "all",
        &[
            "rank 1 of 3: finish of group \"world\": the ranks disagree: \
             rank 0 calls all_reduce of group \"world\"; rank 1 calls finish",
        ],
    ),
    // On another communicator.
    (
        "amaxes",
        &["rank 0 calls all_reduce_max of group \"world\"; rank 1 calls finish"],
    ),
    // Of ranks 1 and 2; rank 0 has come to its end too.
    (
        "part",
        &["rank 1 calls finish; rank 2 calls barrier of group \"part\""],
    ),
    // Rank 0 gives data that nobody takes. If the library keeps them, it comes to its end too, after more calls than the others.
    (
        "broadcast",
        &["the ranks disagree: rank 0 calls ", " calls finish"],
    ),
];

#[test]
fn a_job_ends_soon_after_a_rank_has_come_to_its_end_alone() {
    for (wait, expected) in EARLY_ENDS {
        let ended = run(mpirun(3, "ending_early").env("FP8_RANKS_WAIT", wait), HANGS);
        println!("{wait}: {:?} after {:?}", ended.status.code(), ended.took);
        // About a second; a slow machine may need more, and without the roll call it would be the deadline.
        let soon = ended.took < HANGS / 10;
        assert!(soon, "{wait}: {:?}: {}", ended.took, ended.said);
        assert!(!ended.status.success(), "{wait}: {}", ended.said);
        for text in expected {
            assert!(
                ended.said.contains(text),
                "{wait}: no {text:?} in {}",
                ended.said
            );
        }
    }
}

#[test]
#[ignore = "run by a_job_ends_soon_after_a_rank_has_come_to_its_end_alone under mpirun"]
fn ending_early() {
    // Longer than a rank may wait here.
    let options = WorldOptions::default().with_deadline(2 * HANGS);
    let world = World::join(options).expect("the others");
    let group = world.group();
    let color = (group.rank() > 0).then_some(0);
    let part = group.split(color, 0, "part").expect("groups");
    sum(group).expect("sums");
    println!("{LAST_WORDS}");
    let own = candle_core::Tensor::new(&[1f32; 10], &candle_core::Device::Cpu).expect("a tensor");
    match (&*from_parent("FP8_RANKS_WAIT"), group.rank()) {
        ("all", 0 | 2) => sum(group).expect("sums"),
        ("amaxes", 0 | 2) => drop(group.all_reduce_max(&own).expect("a maximum")),
        ("part", 2) => part.expect("a group").barrier().expect("a barrier"),
        ("broadcast", 0) => drop(group.broadcast(&own, 0).expect("a tensor")),
        _ => {}
    }
    world.finish().expect("the end");
}

/// Because it saves a file, say. The others wait long enough to tell each other for what, at different calls, and some at their end.
#[test]
fn a_rank_may_let_the_others_wait() {
    let ended = run(&mut mpirun(3, "letting_others_wait"), HANGS);
    assert!(ended.status.success(), "{}", ended.said);
    assert_eq!(ended.passed, 3, "{}", ended.said);
}

#[test]
#[ignore = "run by a_rank_may_let_the_others_wait under mpirun"]
fn letting_others_wait() {
    let world = World::join(WorldOptions::default().with_deadline(HANGS)).expect("the others");
    let group = world.group();
    let rank = group.rank();
    // Each rank once, then one of them before its end.
    for slow in 0..3 {
        if rank == slow {
            std::thread::sleep(Duration::from_millis(1200));
        }
        sum(group).expect("sums");
    }
    if rank == 2 {
        std::thread::sleep(Duration::from_millis(1200));
    }
    world.finish().expect("the end");
    rank_passed(rank);
}

/// With `end_on_panic` it would end the process.
#[test]
fn a_job_goes_on_after_a_panic_that_it_handles() {
    let ended = run(&mut mpirun(2, "handling_a_panic"), HANGS);
    assert!(ended.status.success(), "{}", ended.said);
    assert_eq!(ended.passed, 2, "{}", ended.said);
}

#[test]
#[ignore = "run by a_job_goes_on_after_a_panic_that_it_handles under mpirun"]
fn handling_a_panic() {
    let options = WorldOptions::default().with_deadline(HANGS);
    let world = World::join(options.with_end_on_panic(false)).expect("the others");
    let group = world.group();
    sum(group).expect("a sum");
    if group.rank() == 1 {
        let loader = std::thread::spawn(|| panic!("a bug"));
        assert!(loader.join().is_err());
    }
    sum(group).expect("a sum");
    let rank = group.rank();
    world.finish().expect("the end");
    rank_passed(rank);
}

/// Each of these would otherwise be one of several jobs that write the same files.
#[test]
fn a_launcher_of_another_library_is_refused() {
    for variable in ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"] {
        let ended = run(child("joining").env(variable, "2"), HANGS);
        assert!(!ended.status.success(), "{}", ended.said);
        let text = format!(
            "{variable}=2 says that a launcher started 2 processes, but this process is in a group of 1: \
             start it with the mpirun of the library that it was built with, "
        );
        assert!(ended.said.contains(&text), "{}", ended.said);
    }
}

#[test]
#[ignore = "run by a_launcher_of_another_library_is_refused in a child process"]
fn joining() {
    if let Err(error) = World::join(WorldOptions::default()) {
        panic!("{error}");
    }
}
