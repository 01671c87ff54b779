//! Ranks as threads: the cases that hold on every engine, and what only this one does.

#[path = "../cases/mod.rs"]
mod cases;
mod ends;
mod faults;
mod mismatches;

use fp8_ranks::{Error, Failure, ProcessGroup, Result, threads};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The error of a rank and its reason.
#[track_caller]
fn failure<T: std::fmt::Debug>(result: std::thread::Result<Result<T>>) -> (String, Failure) {
    let error = result.expect("no panic").expect_err("an error");
    match &error {
        Error::Collective { failure, .. } => (error.to_string(), failure.clone()),
        other => panic!("{other}"),
    }
}

#[test]
fn every_case_on_one_to_four_ranks() {
    for ranks in 1..=4 {
        for (name, case) in cases::CASES {
            println!("{name} on {ranks} ranks");
            threads::run(ranks, |group| case(&group));
        }
    }
}

#[test]
fn every_case_in_one_process() {
    for (name, case) in cases::CASES {
        println!("{name}");
        case(&ProcessGroup::single());
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let come = AtomicUsize::new(0);
    threads::run(4, |group| {
        for round in 1..50 {
            come.fetch_add(1, Ordering::SeqCst);
            group.barrier().expect("barrier");
            assert!(come.load(Ordering::SeqCst) >= 4 * round);
            group.barrier().expect("barrier");
        }
    });
}

/// A result does not change when the tensor that was given does.
#[test]
fn results_have_memory_of_their_own() {
    for ranks in [1, 2] {
        threads::run(ranks, |group| {
            let variable =
                candle_core::Var::new(&[1f32, 2.], &candle_core::Device::Cpu).expect("a variable");
            let got = group.broadcast(&variable, 0).expect("broadcast");
            group.barrier().expect("barrier");
            variable
                .set(&variable.zeros_like().expect("zeros"))
                .expect("set");
            group.barrier().expect("barrier");
            assert_eq!(got.to_vec1::<f32>().expect("values"), [1., 2.]);
        });
    }
}
