//! Prints the instruction sets that this processor has, one per line, from the slowest to the fastest: the values of `FP8_ISA`.
//!
//! `cargo run --example isa`

use fp8::fp8_core::Isa;

fn main() {
    for isa in Isa::available() {
        println!("{}", isa.level().name());
    }
}
