//! Ranks that end by `finish`.

use crate::failure;
use candle_core::{Device, Tensor};
use fp8_ranks::threads::{Fault, Threads, finish};
use fp8_ranks::{Error, Failure, ProcessGroup, ReduceOp, ReductionGroup, Result};
use std::time::Duration;

fn numbers() -> Tensor {
    Tensor::new(&[1f32, 2., 3.], &Device::Cpu).expect("a tensor")
}

fn sum(group: &ProcessGroup) -> Result<()> {
    group.all_reduce(&numbers(), ReduceOp::Sum).map(drop)
}

#[test]
fn ranks_that_finish_together_end_well() {
    for ranks in 1..=4 {
        for result in Threads::new(ranks).run(|group| {
            sum(&group)?;
            // Any group of the job will do.
            let part = group.split(Some(group.rank() / 2), 0, "part")?;
            finish(&part.expect("a group"))
        }) {
            result.expect("no panic").expect("the end");
        }
    }
    finish(&ProcessGroup::single()).expect("the end");
}

/// What ranks other than rank 1, which ends at once, do in a job of three, with a group of ranks 1 and 2.
type Wait = fn(&ProcessGroup, Option<ProcessGroup>) -> Result<()>;

/// At once: the deadline is that of minutes which groups have by default.
#[test]
fn a_rank_that_finishes_early_is_an_error_on_all() {
    let cases: [(Wait, &str); 4] = [
        (
            |group, _| sum(group),
            "calls all_reduce of group \"world\" with 3 F32",
        ),
        // Amaxes have a communicator of their own.
        (
            |group, _| {
                let amaxes = group.all_reduce_max(&numbers());
                amaxes.map(drop).map_err(|error| match error {
                    fp8_candle::Error::Group(error) => {
                        *error.downcast::<Error>().expect("an error of ranks")
                    }
                    other => panic!("{other}"),
                })
            },
            "calls all_reduce_max of group \"world\" with 3 U32",
        ),
        // Rank 0 is at its end too.
        (
            |group, part| part.map_or_else(|| finish(group), |part| part.barrier()),
            "the ranks disagree: rank 1 calls finish; rank 2 calls barrier of group \"part\"",
        ),
        // Rank 2 comes to its end with a collective that nobody waits for any more.
        (
            |group, _| {
                if group.rank() == 2 {
                    drop(group.start_all_reduce(&numbers(), ReduceOp::Sum)?);
                }
                finish(group)
            },
            "rank 1 calls finish; rank 2 calls all_reduce of group \"world\" with 3 F32",
        ),
    ];
    for (wait, expected) in cases {
        let results = Threads::new(3).run(|group| {
            let color = (group.rank() > 0).then_some(0);
            let part = group.split(color, 0, "part")?;
            sum(&group)?;
            match group.rank() {
                1 => finish(&group),
                _ => wait(&group, part),
            }
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (message, failure) = failure(result);
            assert!(matches!(failure, Failure::Mismatch { .. }), "{message}");
            for text in [expected, "rank 1 calls finish"] {
                assert!(message.contains(text), "rank {rank}: {message}");
            }
        }
    }
}

#[test]
fn ranks_at_their_end_name_one_that_is_stuck_or_leaves() {
    let job = Threads::new(3).with_deadline(Duration::from_millis(200));
    let results = job.with_fault(1, 0, Fault::Stall).run(|group| {
        if group.rank() == 1 {
            sum(&group)?;
        }
        finish(&group)
    });
    for result in results {
        let (message, failure) = failure(result);
        let Failure::Deadline { missing, .. } = failure else {
            panic!("{message}");
        };
        assert_eq!(missing, [1]);
    }
    let results = Threads::new(3).run(|group| match group.rank() {
        1 => Ok(()),
        _ => finish(&group),
    });
    for (rank, result) in results.into_iter().enumerate() {
        if rank == 1 {
            result.expect("no panic").expect("no error");
            continue;
        }
        let (message, failure) = failure(result);
        assert!(
            matches!(failure, Failure::Rank { rank: 1, .. }),
            "{message}"
        );
        let begin = format!("rank {rank} of 3: finish of group \"world\": rank 1 failed: ");
        assert!(message.starts_with(&begin), "{message}");
    }
}

#[test]
fn nothing_can_be_called_after_the_end_or_an_error() {
    let calls: [fn(&ProcessGroup) -> Result<()>; 2] = [|group| group.barrier(), finish];
    for call in calls {
        for result in Threads::new(2).run(|group| {
            finish(&group).expect("the end");
            call(&group)
        }) {
            let (message, failure) = failure(result);
            assert!(matches!(failure, Failure::Ended), "{message}");
        }
    }
    for result in Threads::new(2).run(|group| {
        if group.rank() == 0 {
            return Err(group.give_up("no more"));
        }
        finish(&group)
    }) {
        let error = result.expect("no panic").expect_err("an error").to_string();
        assert!(error.contains("no more"), "{error}");
    }
}
