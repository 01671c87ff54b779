//! Counts which way FP8 products took. The slow way gives the right values too, so only counts reveal it.

use std::cell::Cell;

/// How many FP8 products of this thread took which way, see the table in `gemm.rs`. Products without elements are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GemmPaths {
    /// Multiplied and scaled by cuBLASLt.
    pub direct: usize,
    /// Multiplied by cuBLASLt into f32, then scaled and rounded by a kernel: per-row scales on chips that only take one scale
    /// per operand.
    pub scaled_after: usize,
    /// Decoded to bf16, which is exact for them, and multiplied by cuBLASLt into f32: formats that the chip cannot multiply, MX
    /// scales on chips without them.
    pub decoded: usize,
    /// Decoded and multiplied in f32, 20 to 30 times slower: scales that cuBLASLt has no layout for.
    pub dequantized: usize,
}

thread_local! {
    static COUNTS: Cell<GemmPaths> = const { Cell::new(GemmPaths { direct: 0, scaled_after: 0, decoded: 0, dequantized: 0 }) };
}

/// Counts a product; `way` picks its count.
pub(super) fn count(way: fn(&mut GemmPaths) -> &mut usize) {
    let mut counts = COUNTS.get();
    *way(&mut counts) += 1;
    COUNTS.set(counts);
}

/// The FP8 products that this thread has computed on CUDA devices since the last call, by the way they took.
pub fn take_gemm_paths() -> GemmPaths {
    COUNTS.take()
}
