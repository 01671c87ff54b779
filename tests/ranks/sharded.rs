//! Parameters in parts: N ranks give what N ranks with whole parameters give, to the bit.

use crate::sharding::{Sharded, on_parts};
use crate::training::on_ranks;
use candle_core::{DType, Device, Module, Tensor};
use fp8::optim::{AdamW, AdamWConfig, DataParallelOptions, OptimError};
use fp8::ranks::{Error, Operation, ProcessGroup, ShardedVar, ShardedVarMap, threads};

const STEPS: usize = 8;

const RECIPES: [Option<&str>; 10] = [
    None,
    Some("delayed"),
    Some("tensorwise"),
    Some("current"),
    Some("rowwise"),
    Some("rowwise_with_gw_hp"),
    Some("blockwise"),
    Some("mxfp8"),
    Some("direct"),
    Some("hybrid"),
];

#[test]
fn parts_equal_whole_parameters_to_the_bit() {
    for recipe in RECIPES {
        for ranks in [2, 4] {
            let whole = threads::run(ranks, |group| {
                on_ranks(&group, recipe, STEPS, DataParallelOptions::default()).unwrap()
            });
            let parts = threads::run(ranks, |group| {
                on_parts(&group, recipe, STEPS).unwrap()
            });
            for (rank, (whole, parts)) in whole.into_iter().zip(parts).enumerate() {
                let case = format!("{recipe:?}, rank {rank} of {ranks}");
                assert_eq!(whole.0, parts.0, "{case}: losses");
                assert!(parts.1.len() > 30, "{case}: {:?}", parts.1.keys());
                for (name, got) in &parts.1 {
                    assert!(whole.1.get(name) == Some(got), "{case}: {name}");
                }
            }
        }
    }
}
