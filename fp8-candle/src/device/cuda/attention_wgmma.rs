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

kernels! { ATTENTION_BACKWARD_WGMMA_KERNELS in ATTENTION_BACKWARD_WGMMA;
    BACKWARD_KV_64 = one "fp8_attention_backward_kv_wgmma_d64_bf16"("pppppplllllllllllliiiiiiffpplll");
    BACKWARD_KV_128 = one "fp8_attention_backward_kv_wgmma_d128_bf16"("pppppplllllllllllliiiiiiffpplll");
    BACKWARD_Q_64 = one "fp8_attention_backward_q_wgmma_d64_bf16"("pppppplllllllllllliiiiiiffplll");
    BACKWARD_Q_128 = one "fp8_attention_backward_q_wgmma_d128_bf16"("pppppplllllllllllliiiiiiffplll");
}

/// The architecture whose code has these kernels; elsewhere they are empty.
const ARCHITECTURE: &str = "90a";
/// Threads of a warpgroup, and the queries or keys that it computes.
const THREADS: usize = 128;
pub(super) const ROWS: usize = 64;
/// Tiles or pairs of tiles that are in shared memory beside those that stay.
pub(super) const SLOTS: usize = 4;

/// A kernel on products of warpgroups, with its launch.
pub(super) type Launch = (Kernel, Shape);

/// Whether `gpu` runs the kernels of the module of `kernel` for tensors of `dtype`. `mma.sync` computes the rest: other chips,
/// programs that have no code for Hopper or whose code the driver does not take, f32 and f16.
pub(super) fn runs(gpu: &Gpu, kernel: &Kernel, dtype: DType) -> Result<bool> {
    let fits = gpu.capability() == (9, 0) && dtype == DType::BF16;
    Ok(fits && loaded::architecture(gpu, kernel.module)? == ARCHITECTURE)
}

/// The kernel for the next larger head size, and that size.
pub(super) fn for_heads(attention: &Attention, kernels: [Kernel; 2]) -> (Kernel, usize) {
    match attention.head_dim {
        ..=64 => (kernels[0], 64),
        _ => (kernels[1], 128),
    }
}

/// `blocks` blocks of `groups` warpgroups and one that copies, with shared memory for `elements` of bf16 and `floats` f32.
pub(super) fn shape(blocks: usize, groups: usize, elements: usize, floats: usize) -> Shape {
    let bytes = elements * DType::BF16.size_in_bytes() + floats * size_of::<f32>();
    Shape {
        shared: bytes as u32,
        ..Shape::blocks(blocks, ((groups + 1) * THREADS) as u32)
    }
}

/// A forward pass in `dtype`, if it runs on products of warpgroups: the softmax scale has to be above 0 (`scale_log2` is what the
/// kernel gets of it).
pub(super) fn forward(
    gpu: &Gpu,
    attention: &Attention,
    dtype: DType,
    scale_log2: f32,
) -> Result<Option<Launch>> {
    const KEYS: usize = 128;
    let (kernel, head_dim) = for_heads(attention, [FORWARD_64, FORWARD_128]);
    if scale_log2.is_nan() || scale_log2 <= 0.0 || !runs(gpu, &kernel, dtype)? {
        return Ok(None);
    }
    let groups = if head_dim == 64 { 3 } else { 2 };
    let queries = groups * ROWS;
    let blocks = attention.pairs() * attention.queries.div_ceil(queries);
    let elements = (queries + SLOTS * KEYS) * head_dim;
    Ok(Some((kernel, shape(blocks, groups, elements, 0))))
}

/// Warpgroups that compute in a block of the backward pass, and queries or keys of a step.
pub(super) const BACKWARD_GROUPS: usize = 2;
pub(super) const BACKWARD_STEP: usize = 64;

/// Two tiles of a block's rows, and in each slot two of a step's.
pub(super) fn backward_elements(head_dim: usize) -> usize {
    2 * (BACKWARD_GROUPS * ROWS + SLOTS * BACKWARD_STEP) * head_dim
}

/// The gradients of keys and values in `dtype`, if they run on products of warpgroups.
pub(super) fn backward_kv(
    gpu: &Gpu,
    attention: &Attention,
    dtype: DType,
) -> Result<Option<Launch>> {
    let (kernel, head_dim) = for_heads(attention, [BACKWARD_KV_64, BACKWARD_KV_128]);
    if !runs(gpu, &kernel, dtype)? {
        return Ok(None);
    }
    let tiles = attention.keys.div_ceil(BACKWARD_GROUPS * ROWS);
    let blocks = attention.batch * attention.kv_heads * tiles;
    // Each slot has two statistics of its queries too.
    let floats = SLOTS * 2 * BACKWARD_STEP;
    let shape = shape(blocks, BACKWARD_GROUPS, backward_elements(head_dim), floats);
    Ok(Some((kernel, shape)))
}

/// The gradient of queries in `dtype`, if it runs on products of warpgroups.
pub(super) fn backward_q(gpu: &Gpu, attention: &Attention, dtype: DType) -> Result<Option<Launch>> {
    let (kernel, head_dim) = for_heads(attention, [BACKWARD_Q_64, BACKWARD_Q_128]);
    if !runs(gpu, &kernel, dtype)? {
        return Ok(None);
    }
    let blocks = attention.pairs() * attention.queries.div_ceil(BACKWARD_GROUPS * ROWS);
    let shape = shape(blocks, BACKWARD_GROUPS, backward_elements(head_dim), 0);
    Ok(Some((kernel, shape)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::attention_args::example;

    /// All three kernels where the loaded code is that of 9.0a, for bf16 alone, and none elsewhere.
    #[test]
    fn bf16_on_hopper_is_multiplied_by_warpgroups() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            return Ok(());
        }
        let gpu = Gpu::new(&device)?;
        let hopper = gpu.capability() == (9, 0)
            && loaded::architecture(&gpu, FORWARD_64.module)? == ARCHITECTURE;
        const MOST_SHARED: u32 = 227 << 10;
        for head_dim in [8, 64, 72, 128] {
            let a = example(300, head_dim);
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let launches = [
                    forward(&gpu, &a, dtype, 0.2)?,
                    backward_kv(&gpu, &a, dtype)?,
                    backward_q(&gpu, &a, dtype)?,
                ];
                for (kernel, shape) in launches.iter().flatten() {
                    let size = if head_dim <= 64 { "_d64_" } else { "_d128_" };
                    assert!(kernel.name.contains(size), "{}: {head_dim}", kernel.name);
                    assert!(shape.shared <= MOST_SHARED, "{}: {shape:?}", kernel.name);
                }
                let chosen = launches.map(|launch| launch.is_some());
                assert_eq!(chosen, [hopper && dtype == DType::BF16; 3], "{dtype:?}");
            }
            for scale in [0.0, -0.2, f32::NAN] {
                assert!(forward(&gpu, &a, DType::BF16, scale)?.is_none(), "{scale}");
            }
        }
        Ok(())
    }
}
