//! Groups within a group.

use candle_core::{Device, Tensor};
use fp8_ranks::{ProcessGroup, ReduceOp};

/// The ranks of `group`, told by themselves.
fn members(group: &ProcessGroup, own: usize) -> Vec<usize> {
    let own = Tensor::full(own as u32, 1, &Device::Cpu).expect("a tensor");
    let all = group
        .all_gather(&own, &vec![1; group.size()])
        .expect("all_gather");
    let all = all.to_vec1::<u32>().expect("values");
    all.into_iter().map(|rank| rank as usize).collect()
}

pub fn rows_and_columns(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.size());
    let width = 2;
    let split = |color, name| {
        let group = group.split(Some(color), rank, name).expect("split");
        group.expect("a rank with a color has a group")
    };
    let row = split(rank / width, "row");
    let column = split(rank % width, "column");
    let in_row: Vec<_> = (0..ranks)
        .filter(|other| other / width == rank / width)
        .collect();
    let in_column: Vec<_> = (0..ranks)
        .filter(|other| other % width == rank % width)
        .collect();
    assert_eq!(members(&row, rank), in_row);
    assert_eq!(members(&column, rank), in_column);
    assert_eq!((row.name(), column.name()), ("row", "column"));
    assert_eq!(in_row[row.rank()], rank);
    assert_eq!((row.size(), column.size()), (in_row.len(), in_column.len()));
    let again = row.with_options(row.options());
    let within = |other: &ProcessGroup| again.is_within(other);
    assert_eq!(
        [&again, &row, group, &column].map(within),
        [true, true, true, false]
    );
    assert!(!row.is_within(&again) && !group.is_within(&row));
    // Groups do not disturb each other, and the sum of sums is that of all.
    let own = Tensor::new(&[1 << rank], &Device::Cpu).expect("a tensor");
    let own: Tensor = own.to_dtype(candle_core::DType::I64).expect("a cast");
    let in_rows = row.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    let all = column
        .all_reduce(&in_rows, ReduceOp::Sum)
        .expect("all_reduce");
    let whole = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    assert_eq!(whole.to_vec1::<i64>().expect("values"), [(1 << ranks) - 1]);
    // A last row that is not full lacks columns.
    if ranks.is_multiple_of(width) {
        assert_eq!(all.to_vec1::<i64>().expect("values"), [(1 << ranks) - 1]);
    }
}

pub fn keys_order_ranks(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.size());
    let backward = group
        .split(Some(7), ranks - rank, "backward")
        .expect("split");
    let backward = backward.expect("a group");
    assert_eq!(backward.rank(), ranks - 1 - rank);
    assert_eq!(
        members(&backward, rank),
        (0..ranks).rev().collect::<Vec<_>>()
    );
    let same_keys = group
        .split(Some(0), 5, "same")
        .expect("split")
        .expect("a group");
    assert_eq!(same_keys.rank(), rank);
    let first = group
        .split((rank == 0).then_some(0), 0, "first")
        .expect("split");
    assert_eq!(first.map(|first| first.size()), (rank == 0).then_some(1));
    group.barrier().expect("the group of all goes on");
}
