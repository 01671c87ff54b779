//! Parameters in parts: N ranks give what N ranks with whole parameters give, to the bit.

use crate::sharding::on_parts;
use crate::training::on_ranks;
use fp8::optim::DataParallelOptions;
use fp8::ranks::threads;
use std::collections::BTreeMap;

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
                let recipe = recipe.map(|name| name.parse().unwrap());
                on_parts(&group, recipe, STEPS).unwrap()
            });
            for (rank, (whole, parts)) in whole.into_iter().zip(parts).enumerate() {
                let case = format!("{recipe:?}, rank {rank} of {ranks}");
                assert_eq!(whole.0, parts.0, "{case}: losses");
                if rank > 0 {
                    continue;
                }
                // Draws of all ranks are counted in both.
                let names = |state: &BTreeMap<String, Vec<u8>>| state.keys().cloned().collect();
                let [expected, got]: [Vec<String>; 2] = [names(&whole.1), names(&parts.1)];
                assert_eq!(expected, got, "{case}");
                for (name, got) in &parts.1 {
                    assert!(whole.1.get(name) == Some(got), "{case}: {name}");
                }
            }
        }
    }
}
