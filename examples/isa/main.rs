//! The instruction sets that this processor has, one a line, from the slowest to the fastest: what `FP8_ISA` takes.
//!
//! `cargo run --example isa`

use fp8::fp8_core::Isa;

fn main() {
    for isa in Isa::available() {
        println!("{}", isa.level().name());
    }
}
