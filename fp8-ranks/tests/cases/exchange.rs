//! Rows and bytes to other ranks.

use super::data::{DTYPES, assert_same, mixed, numbers};
use candle_core::{DType, Device, Tensor};
use fp8_ranks::ProcessGroup;

/// Rows of each rank: even, uneven, with zeros, none at all.
fn divisions(ranks: usize) -> Vec<Vec<usize>> {
    vec![
        vec![3; ranks],
        (0..ranks).map(|rank| rank * rank + 1).collect(),
        (0..ranks).map(|rank| rank % 2 * 5).collect(),
        (0..ranks).map(|rank| (rank + 1) % 2 * 4000).collect(),
        vec![0; ranks],
    ]
}

fn rows(flat: &Tensor, rows: usize, width: usize) -> Tensor {
    flat.reshape((rows, width)).expect("rows")
}

pub fn all_gather(group: &ProcessGroup) {
    for dtype in DTYPES {
        for counts in divisions(group.size()) {
            for width in [1, 3] {
                let own = |rank: usize| {
                    rows(
                        &numbers(rank, counts[rank] * width, dtype),
                        counts[rank],
                        width,
                    )
                };
                let all: Vec<_> = (0..group.size()).map(own).collect();
                let expected = Tensor::cat(&all, 0).expect("all rows");
                let got = group
                    .all_gather(&all[group.rank()], &counts)
                    .expect("all_gather");
                assert_same(&got, &expected, &format!("{dtype:?} {counts:?} of {width}"));
            }
        }
    }
}

pub fn all_to_all(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.size());
    // From one rank to another: what differs by pair, and zeros.
    let tables: [fn(usize, usize) -> usize; 3] = [
        |from, to| from + 2 * to + 1,
        |from, to| if from == to { 0 } else { 700 },
        |from, to| (from + to) % 2,
    ];
    for dtype in DTYPES {
        for table in tables {
            for width in [1, 4] {
                let piece = |from: usize, to: usize| {
                    let all: usize = (0..ranks).map(|to| table(from, to)).sum();
                    let begin: usize = (0..to).map(|to| table(from, to)).sum();
                    let all = rows(&numbers(from, all * width, dtype), all, width);
                    all.narrow(0, begin, table(from, to)).expect("rows")
                };
                let joined = |pieces: Vec<Tensor>| Tensor::cat(&pieces, 0).expect("rows");
                let own = joined((0..ranks).map(|to| piece(rank, to)).collect());
                let expected = joined((0..ranks).map(|from| piece(from, rank)).collect());
                let send: Vec<_> = (0..ranks).map(|to| table(rank, to)).collect();
                let receive: Vec<_> = (0..ranks).map(|from| table(from, rank)).collect();
                let got = group.all_to_all(&own, &send, &receive).expect("all_to_all");
                assert_same(&got, &expected, &format!("{dtype:?} {send:?} {receive:?}"));
            }
        }
    }
}

pub fn broadcast(group: &ProcessGroup) {
    for dtype in DTYPES {
        for root in 0..group.size() {
            for len in [0, 1, 6, 60_000] {
                let of = |rank: usize| {
                    numbers(rank, len, dtype).reshape((2, ())).or_else(|_| {
                        // An odd or empty one.
                        numbers(rank, len, dtype).reshape(len)
                    })
                };
                let own = of(group.rank()).expect("a tensor");
                let got = group.broadcast(&own, root).expect("broadcast");
                assert_same(
                    &got,
                    &of(root).expect("a tensor"),
                    &format!("{dtype:?} {len} from {root}"),
                );
            }
        }
    }
}

pub fn broadcast_bytes(group: &ProcessGroup) {
    for root in 0..group.size() {
        for len in [0, 1, 128, 100_000] {
            let bytes: Vec<_> = (0..len).map(|i| mixed(root, i) as u8).collect();
            let own = (group.rank() == root).then_some(&bytes[..]);
            assert_eq!(group.broadcast_bytes(own, root).expect("bytes"), bytes);
        }
    }
}

/// That nobody passes one early is in `thread_ranks/`, where ranks share memory.
pub fn barrier(group: &ProcessGroup) {
    for _ in 0..20 {
        group.barrier().expect("barrier");
    }
    // Nothing of the barriers stays behind.
    let own = Tensor::full(group.rank() as u32, 1, &Device::Cpu).expect("a tensor");
    let all = group
        .all_gather(&own, &vec![1; group.size()])
        .expect("all_gather");
    assert_eq!(all.dtype(), DType::U32);
    let all = all.to_vec1::<u32>().expect("values");
    assert_eq!(all.len(), group.size());
    assert!(
        all.iter()
            .enumerate()
            .all(|(rank, got)| rank == *got as usize)
    );
}
