//! Ranks that disagree get one error, at once, that says who called what.

use candle_core::{DType, Device, Tensor};
use fp8_ranks::threads::Threads;
use fp8_ranks::{Error, Failure, ProcessGroup, ReduceOp, Result};

fn zeros(len: usize, dtype: DType) -> Tensor {
    Tensor::zeros(len, dtype, &Device::Cpu).expect("a tensor")
}

/// What two ranks do, and what the message says about rank 1.
type Case = (fn(&ProcessGroup) -> Result<()>, &'static str);

fn refused(case: Case) -> Vec<Error> {
    let (call, _) = case;
    // The default deadline of minutes is never waited for.
    let results = Threads::new(3).run(|group| call(&group));
    let results = results.into_iter().map(|result| result.expect("no panic"));
    results
        .map(|result| result.expect_err("an error on every rank"))
        .collect()
}

#[test]
fn every_rank_gets_the_same_error() {
    let cases: [Case; 7] = [
        (
            |group| match group.rank() {
                1 => group.barrier(),
                _ => group
                    .all_reduce(&zeros(6, DType::F32), ReduceOp::Sum)
                    .map(drop),
            },
            "rank 1 calls barrier of group \"world\"",
        ),
        (
            |group| {
                group
                    .all_reduce(&zeros(6 + group.rank() % 2, DType::U32), ReduceOp::Max)
                    .map(drop)
            },
            "rank 1 calls all_reduce of group \"world\" with 7 U32",
        ),
        (
            |group| {
                group
                    .all_reduce(
                        &zeros(6 + 3 * (group.rank() % 2), DType::F32),
                        ReduceOp::Sum,
                    )
                    .map(drop)
            },
            "rank 1 calls all_reduce of group \"world\" with 9 F32 (sends [3, 3, 3], expects [3, 3, 3])",
        ),
        (
            |group| {
                let dtype = [DType::F32, DType::F64][group.rank() % 2];
                group.broadcast(&zeros(3, dtype), 2).map(drop)
            },
            "rank 1 calls broadcast of group \"world\" with 3 F64 from 2",
        ),
        (
            |group| {
                group
                    .broadcast(&zeros(3, DType::U8), group.rank() % 2)
                    .map(drop)
            },
            "rank 1 calls broadcast of group \"world\" with 3 U8 from 1",
        ),
        (
            |group| {
                let counts = [[2, 2, 2], [1, 2, 3]][group.rank() % 2];
                group
                    .all_gather(&zeros(counts[group.rank()], DType::U8), &counts)
                    .map(drop)
            },
            "rank 1 calls all_gather of group \"world\" with 2 U8 of [1, 2, 3]",
        ),
        (
            |group| match group.rank() {
                1 => group.split(Some(0), 0, "new").map(drop),
                _ => group.barrier(),
            },
            "rank 1 calls split",
        ),
    ];
    for case in cases {
        for (rank, error) in refused(case).into_iter().enumerate() {
            let Error::Collective {
                failure: Failure::Mismatch { calls },
                rank: named,
                size: 3,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!((*named, calls.len()), (rank, 3));
            assert_eq!(calls[1], case.1);
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("rank {rank} of 3: ")),
                "{error}"
            );
        }
    }
}

/// What a rank sees alone breaks the group too: the others wait for it.
#[test]
fn bad_arguments_of_one_rank_are_an_error_of_all() {
    let cases: [Case; 6] = [
        (
            |group| {
                group
                    .all_gather(&zeros(3, DType::F32), &[3, 3 + group.rank() % 2, 3])
                    .map(drop)
            },
            "all_gather of group \"world\": a tensor of shape [3] with 3 rows, but the counts say 4",
        ),
        (
            |group| {
                group
                    .all_gather(&zeros(3, DType::F32), &[3, 3, 3][group.rank() % 2..])
                    .map(drop)
            },
            "all_gather of group \"world\": 2 counts for 3 ranks; give one for each",
        ),
        (
            |group| {
                group
                    .broadcast(&zeros(3, DType::F32), 2 + group.rank() % 2)
                    .map(drop)
            },
            "broadcast of group \"world\": root 3 of 3 ranks; ranks count from 0",
        ),
        (
            |group| {
                let dtype = [DType::F32, DType::U8][group.rank() % 2];
                group.all_reduce(&zeros(3, dtype), ReduceOp::Sum).map(drop)
            },
            "all_reduce of group \"world\": a tensor of U8, expected F32, F64, BF16, F16, U32 or I64 for a sum",
        ),
        (
            |group| group.broadcast_bytes(None, 1).map(drop),
            "broadcast of group \"world\": the root, rank 1, has given no data",
        ),
        (
            |group| match group.rank() {
                1 => Err(group.give_up("loss is NaN")),
                _ => group.barrier(),
            },
            "loss is NaN",
        ),
    ];
    for case in cases {
        let errors = refused(case);
        let own = errors[1].to_string();
        assert!(
            own.starts_with("rank 1 of 3") && own.contains(case.1),
            "{own}"
        );
        for rank in [0, 2] {
            let Error::Collective {
                failure: Failure::Rank { rank: 1, message },
                ..
            } = &errors[rank]
            else {
                panic!("{}", errors[rank]);
            };
            assert_eq!(**message, own);
        }
    }
}

/// Nothing can be called after an error, on any group of the job.
#[test]
fn a_broken_job_stays_broken() {
    let results = Threads::new(2).run(|group| {
        let part = group.split(Some(0), 0, "part")?.expect("a group");
        let first = match group.rank() {
            0 => group.barrier(),
            _ => Err(group.give_up("no more")),
        };
        let first = first.expect_err("the end of the job").to_string();
        assert!(first.contains("no more"), "{first}");
        part.barrier()
    });
    for result in results {
        let error = result.expect("no panic").expect_err("it has ended");
        let says_why = matches!(
            &error,
            Error::Collective { failure: Failure::Rank { rank: 1, message }, .. } if message.contains("no more")
        );
        assert!(says_why, "{error}");
    }
}
