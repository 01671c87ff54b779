//! See README.md.
#![no_main]

#[path = "../bodies/mod.rs"]
#[allow(dead_code, reason = "each target uses its own part")]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::families::run(data));
