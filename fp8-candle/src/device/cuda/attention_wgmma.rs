//! Attention on products of warpgroups (`wgmma`), which Hopper alone has.

use super::gpu::Gpu;
use super::kernels::{Kernel, Shape, kernels};
use super::loaded;
use crate::base::data::attention::Attention;
use crate::base::error::Result;
use candle_core::DType;

kernels! { ATTENTION_FORWARD_WGMMA_KERNELS in ATTENTION_FORWARD_WGMMA;
    FORWARD_64 = one "fp8_attention_forward_wgmma_d64_bf16"("ppppplllllllllllliiiiiif");
    FORWARD_128 = one "fp8_attention_forward_wgmma_d128_bf16"("ppppplllllllllllliiiiiif");
}

/// The architecture whose code has these kernels; elsewhere they are empty.
const ARCHITECTURE: &str = "90a";
/// Threads of a warpgroup, and the queries that it computes.
const THREADS: usize = 128;
const QUERIES: usize = 64;
/// Keys of a step, and tiles of keys or values in shared memory.
const KEYS: usize = 128;
const SLOTS: usize = 4;

/// The kernel of a forward pass and its launch, or `None` where `mma.sync` computes it: on other chips, where a program has no
/// code for Hopper or the driver does not take it, for f32 and f16, and for a softmax scale that is not above 0 (`scale_log2`
/// is what the kernel gets of it).
pub(super) fn forward(
    gpu: &Gpu,
    attention: &Attention,
    dtype: DType,
    scale_log2: f32,
) -> Result<Option<(Kernel, Shape)>> {
    if gpu.capability() != (9, 0) || dtype != DType::BF16 || !(scale_log2 > 0.0) {
        return Ok(None);
    }
    // Warpgroups with queries; one more copies.
    let (kernel, head_dim, groups) = match attention.head_dim {
        ..=64 => (FORWARD_64, 64, 3),
        _ => (FORWARD_128, 128, 2),
    };
    if loaded::architecture(gpu, kernel.module)? != ARCHITECTURE {
        return Ok(None);
    }
    let queries = groups * QUERIES;
    let blocks = attention.pairs() * attention.queries.div_ceil(queries);
    let rows = queries + SLOTS * KEYS;
    let shape = Shape {
        shared: (rows * head_dim * dtype.size_in_bytes()) as u32,
        ..Shape::blocks(blocks, ((groups + 1) * THREADS) as u32)
    };
    Ok(Some((kernel, shape)))
}
