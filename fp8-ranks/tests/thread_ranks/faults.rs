//! Faults end the job for all ranks, and say which rank it was.

use crate::failure;
use candle_core::{Device, Tensor};
use fp8_ranks::threads::{Fault, Threads};
use fp8_ranks::{Failure, ProcessGroup, ReduceOp, ReductionGroup, Result};
use std::time::Duration;

fn sum(group: &ProcessGroup) -> Result<Vec<f32>> {
    let own = Tensor::new(&[1f32, 2., 3.], &Device::Cpu).expect("a tensor");
    let sum = group.all_reduce(&own, ReduceOp::Sum)?;
    Ok(sum.to_vec1().expect("values"))
}

fn three_sums(group: ProcessGroup) -> Result<Vec<f32>> {
    sum(&group)?;
    sum(&group)?;
    sum(&group)
}

/// Rank 1 has ended without an error, and the others name it.
#[track_caller]
fn assert_rank_1_left(results: Vec<std::thread::Result<Result<Vec<f32>>>>) {
    for (rank, result) in results.into_iter().enumerate() {
        if rank == 1 {
            assert!(result.expect("no panic").is_ok());
            continue;
        }
        let (message, failure) = failure(result);
        assert!(
            matches!(failure, Failure::Rank { rank: 1, .. }),
            "{message}"
        );
    }
}

/// At each of the six collectives of three sums.
#[test]
fn a_stuck_rank_is_named_after_the_deadline() {
    for at in 0..6 {
        let job = Threads::new(3).with_deadline(Duration::from_millis(200));
        let results = job.with_fault(1, at, Fault::Stall).run(three_sums);
        for result in results {
            let (message, failure) = failure(result);
            let Failure::Deadline { missing, waited } = failure else {
                panic!("{message}");
            };
            assert_eq!(missing, [1]);
            assert!(waited >= Duration::from_millis(200));
            assert!(
                message.contains("all_reduce of group \"world\": no answer within"),
                "{message}"
            );
        }
    }
}

/// These need no deadline: with that of minutes the test would not end.
#[test]
fn a_rank_that_panics_or_fails_is_named_at_once() {
    for at in 0..6 {
        let results = Threads::new(3)
            .with_fault(2, at, Fault::Panic)
            .run(three_sums);
        for (rank, result) in results.into_iter().enumerate() {
            if rank == 2 {
                let panic = result.expect_err("a panic");
                let said = panic.downcast_ref::<String>().expect("a text");
                assert!(said.contains("the fault that the test asked for"), "{said}");
                continue;
            }
            let (message, failure) = failure(result);
            assert!(
                matches!(failure, Failure::Rank { rank: 2, .. }),
                "{message}"
            );
            assert!(
                message.contains("it panicked: the fault that the test asked for"),
                "{message}"
            );
        }
        let results = Threads::new(3)
            .with_fault(0, at, Fault::Error)
            .run(three_sums);
        for (rank, result) in results.into_iter().enumerate() {
            let (message, failure) = failure(result);
            match failure {
                Failure::Injected => assert_eq!(rank, 0),
                Failure::Rank { rank: 0, .. } => assert_ne!(rank, 0),
                _ => panic!("{message}"),
            }
        }
    }
}

#[test]
fn a_rank_that_returns_early_is_named_at_once() {
    let results = Threads::new(3).run(|group| match group.rank() {
        1 => Ok(vec![]),
        _ => sum(&group),
    });
    assert_rank_1_left(results);
}

/// Long before its thread ends: here it goes on until the others have given up.
#[test]
fn a_rank_that_drops_its_groups_is_named_at_once() {
    let ended = std::sync::Barrier::new(3);
    let results = Threads::new(3).run(|group| {
        let result = match group.rank() {
            1 => {
                drop(group);
                Ok(vec![])
            }
            _ => sum(&group),
        };
        ended.wait();
        result
    });
    assert_rank_1_left(results);
}

/// Rank 0 ends early, with an error of its own, and the others have dropped the group that they share with it.
#[test]
fn the_end_of_a_rank_that_no_other_needs_is_no_failure() {
    let ended = std::sync::Barrier::new(3);
    let results = Threads::new(3).run(|group| {
        let color = (group.rank() > 0).then_some(0);
        let part = group.split(color, 0, "part").expect("groups");
        drop(group);
        let Some(part) = part else {
            ended.wait();
            return Err("no more batches".to_owned());
        };
        let before = sum(&part);
        // From here on the thread of rank 0 may end at any time.
        ended.wait();
        let after = sum(&part).expect("a sum");
        assert_eq!(before.expect("a sum"), after);
        Ok(after)
    });
    let results = results.into_iter().map(|result| result.expect("no panic"));
    let results: Vec<_> = results.collect();
    let sums = Ok(vec![2., 4., 6.]);
    assert_eq!(
        results,
        [Err("no more batches".to_owned()), sums.clone(), sums]
    );
}

#[test]
fn corrupt_data_arrive_as_they_were_given() {
    let change = Fault::Corrupt(|tensor| tensor.affine(1.0, 10.0));
    // Pieces of one rank.
    let results = Threads::new(3)
        .with_fault(1, 0, change)
        .run(|group| sum(&group));
    for result in results {
        assert_eq!(result.expect("no panic").expect("a sum"), [13., 16., 19.]);
    }
    let nan = Fault::Corrupt(|bits| Tensor::full(f32::NAN.to_bits(), bits.dims(), &Device::Cpu));
    let results = Threads::new(4).with_fault(3, 0, nan).run(|group| {
        let own = Tensor::new(&[1f32, 2.], &Device::Cpu).expect("a tensor");
        group.all_reduce_max(&own)
    });
    for result in results {
        let got = result.expect("no panic").expect("a maximum");
        let got = got.to_vec1::<f32>().expect("values");
        assert!(got.len() == 2 && got.iter().all(|amax| amax.is_nan()));
    }
}

/// Even if no rank ever waits for the one that does not come.
#[test]
fn a_stuck_rank_ends_with_the_others() {
    let results = Threads::new(2)
        .with_fault(0, 0, Fault::Stall)
        .run(|group| match group.rank() {
            0 => group.barrier(),
            _ => Ok(()),
        });
    assert!(matches!(&results[0], Ok(Err(_))));
    assert!(matches!(&results[1], Ok(Ok(()))));
}
