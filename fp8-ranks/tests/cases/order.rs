//! Several operations at a time, and what they cost.

use super::data::{assert_same, tensor, values};
use candle_core::{DType, Device, Tensor};
use fp8_ranks::{Operation, ProcessGroup, ReduceOp, ReductionGroup, Sent};

pub fn several_under_way(group: &ProcessGroup) {
    let own: Vec<_> = (1..6)
        .map(|i| tensor(&values(group.rank() * 10 + i, 1000 * i), DType::F32))
        .collect();
    let one_by_one = own.iter().map(|own| group.all_reduce(own, ReduceOp::Sum));
    let one_by_one: Vec<_> = one_by_one.map(|sum| sum.expect("all_reduce")).collect();
    let start = || -> Vec<_> {
        let started = own
            .iter()
            .map(|own| group.start_all_reduce(own, ReduceOp::Sum));
        started.map(|started| started.expect("start")).collect()
    };
    let counts = vec![1; group.size()];
    let shard = own[0].narrow(0, 0, 1).expect("one");
    let gather = group.start_all_gather(&shard, &counts).expect("start");
    let backward = start().into_iter().zip(&one_by_one).rev();
    for (started, expected) in backward {
        assert_same(
            &started.wait().expect("wait"),
            expected,
            "waited for in another order",
        );
    }
    let advanced = start()
        .into_iter()
        .map(|started| started.advance().expect("advance"));
    let advanced: Vec<_> = advanced.collect();
    group.barrier().expect("barrier");
    for (started, expected) in advanced.into_iter().zip(&one_by_one) {
        assert_same(&started.wait().expect("wait"), expected, "advanced before");
    }
    let gathered = gather.wait().expect("wait");
    assert_eq!(gathered.dims(), [group.size()]);
    let own = gathered.narrow(0, group.rank(), 1).expect("one");
    assert_same(&own, &shard, "gathered");
}

/// Amaxes in the middle of another operation.
pub fn amaxes_do_not_meet_other_data(group: &ProcessGroup) {
    let own = Tensor::full(group.rank() as f32 + 1.0, 4, &Device::Cpu).expect("a tensor");
    let sum = group.start_all_reduce(&own, ReduceOp::Sum).expect("start");
    let max = group.all_reduce_max(&own).expect("all_reduce_max");
    let ranks = group.size() as f32;
    assert_eq!(max.to_vec1::<f32>().expect("values"), [ranks; 4]);
    let sum = sum.wait().expect("wait").to_vec1::<f32>().expect("values");
    assert_eq!(sum, [ranks * (ranks + 1.0) / 2.0; 4]);
}

pub fn traffic(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank() as u64, group.size() as u64);
    let others = ranks - 1;
    group.reset_traffic();
    assert_eq!(group.traffic().total(), Sent::default());
    let own = tensor(&vec![1.0; 12 * group.size()], DType::F32);
    let counts = vec![12; group.size()];
    group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    group
        .reduce_scatter(&own, &counts, ReduceOp::Sum)
        .expect("reduce_scatter");
    let codes = Tensor::zeros(12, DType::U8, &Device::Cpu).expect("a tensor");
    group.all_gather(&codes, &counts).expect("all_gather");
    group
        .all_to_all(&own, &counts, &counts)
        .expect("all_to_all");
    group.broadcast(&own, 0).expect("broadcast");
    group.all_reduce_max(&own).expect("all_reduce_max");
    group.barrier().expect("barrier");
    let sent = |calls, bytes| Sent { calls, bytes };
    let at_root = if rank == 0 { others * 48 * ranks } else { 0 };
    let expected = [
        // Pieces of 12 to each other rank, and the sum of the own one to each; twice.
        (Operation::AllReduce, sent(2, 2 * 2 * 48 * others)),
        (Operation::AllReduceMax, sent(1, 2 * 48 * others)),
        (Operation::AllGather, sent(1, 12 * others)),
        (Operation::ReduceScatter, sent(1, 48 * others)),
        (Operation::AllToAll, sent(1, 48 * others)),
        (Operation::Broadcast, sent(1, at_root)),
        (Operation::Barrier, sent(1, 0)),
    ];
    assert_eq!(group.traffic().iter().collect::<Vec<_>>(), expected);
    assert_eq!(group.traffic().total().calls, 8);
    group.clone().reset_traffic();
    assert_eq!(group.traffic().iter().count(), 0);
}
