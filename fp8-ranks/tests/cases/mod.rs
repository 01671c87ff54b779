//! What a group promises, on whatever engine: each case runs on every rank, and compares with the definition.

pub mod data;
mod exchange;
mod mesh;
mod order;
mod reduce;
mod split;

use fp8_ranks::ProcessGroup;

/// A case, and its name for the test that starts processes.
pub type Case = (&'static str, fn(&ProcessGroup));

/// All of them. Each works with any number of ranks.
pub const CASES: &[Case] = &[
    ("all_gather", exchange::all_gather),
    ("all_to_all", exchange::all_to_all),
    ("broadcast", exchange::broadcast),
    ("broadcast_bytes", exchange::broadcast_bytes),
    ("barrier", exchange::barrier),
    ("sums", reduce::sums_are_in_rank_order),
    ("sums_in_parts", reduce::sums_do_not_depend_on_calls),
    ("engine_sums", reduce::engine_sums),
    ("maxima", reduce::maxima),
    ("nan", reduce::nan_is_the_maximum),
    ("amaxes", reduce::amaxes),
    ("reduce_scatter", reduce::reduce_scatter),
    ("split", split::rows_and_columns),
    ("split_order", split::keys_order_ranks),
    ("mesh", mesh::axes),
    ("no_mesh", mesh::refused),
    ("overlap", order::several_under_way),
    ("amaxes_apart", order::amaxes_do_not_meet_other_data),
    ("traffic", order::traffic),
];
