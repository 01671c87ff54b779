//! Launches of the attention kernels.

use super::attention_args::{int, readable, sizes, softmax_scale_log2, statistics_row, strides};
use super::gpu::{Buffer, Gpu, with_view_pointers};
use super::kernels::{Arg, FloatKernels, Kernel, Shape, kernels};
use super::launch::launch;
use super::{attention_fp8, attention_wgmma};
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::{BackwardOperands, Operand};
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Result, internal};
use crate::device::backend::FusedAttention;
use candle_core::{DType, Device, Layout, Storage, Tensor};

kernels! { ATTENTION_FORWARD_KERNELS in ATTENTION_FORWARD;
    FORWARD_64 = floats "fp8_attention_forward_d64"("ppppplllllllllllliiiiiif");
    FORWARD_128 = floats "fp8_attention_forward_d128"("ppppplllllllllllliiiiiif");
}

kernels! { ATTENTION_BACKWARD_KERNELS in ATTENTION_BACKWARD;
    DELTA = floats "fp8_attention_delta"("pppllllllliii");
    BACKWARD_KV_64 = floats "fp8_attention_backward_kv_d64"("pppppplllllllllllliiiiiiffpplll");
    BACKWARD_KV_128 = floats "fp8_attention_backward_kv_d128"("pppppplllllllllllliiiiiiffpplll");
    BACKWARD_Q_64 = floats "fp8_attention_backward_q_d64"("pppppplllllllllllliiiiiiffplll");
    BACKWARD_Q_128 = floats "fp8_attention_backward_q_d128"("pppppplllllllllllliiiiiiffplll");
}

/// All modules of attention with their kernels.
#[cfg(test)]
pub(crate) const ATTENTION: [&[&[Kernel]]; 8] = [
    ATTENTION_FORWARD_KERNELS,
    attention_wgmma::ATTENTION_FORWARD_WGMMA_KERNELS,
    ATTENTION_BACKWARD_KERNELS,
    attention_wgmma::ATTENTION_BACKWARD_WGMMA_KERNELS,
    attention_fp8::ROUND_ROWS_KERNELS,
    attention_fp8::ATTENTION_FORWARD_FP8_KERNELS,
    attention_fp8::ATTENTION_BACKWARD_Q_FP8_KERNELS,
    attention_fp8::ATTENTION_BACKWARD_KV_FP8_KERNELS,
];

const NAME: &str = "attention";

/// Threads of a block of four warps.
const THREADS: usize = 128;
/// Rows of queries of four warps, with one and with two fragments of 16 rows per warp.
const ROWS: (usize, usize) = (64, 128);
/// The fewest rows of queries or keys that a block computes.
const LEAST_ROWS: usize = 32;

/// The kernels of `kernels/attention_forward.cu` and `kernels/attention_backward.cu`.
pub(crate) struct CudaAttention;

impl FusedAttention for CudaAttention {
    /// f32, bf16 and f16, heads of at most 128 features and a multiple of 8, and no more blocks than a launch can have. Operands
    /// are those of the dtype, or bf16 for f32, or those of [`attention_fp8::supports`]. Windows, lengths and dropout are composed.
    fn supports(&self, attention: &Attention, dtype: DType, device: &Device) -> Result<bool> {
        let a = attention;
        let fits = |n: usize| n <= (i32::MAX / 2) as usize;
        let tiles = a.queries.max(a.keys).div_ceil(LEAST_ROWS);
        let blocks = a.pairs().checked_mul(tiles);
        let sizes = a.head_dim.is_multiple_of(8)
            && a.head_dim <= 128
            && fits(a.queries)
            && fits(a.keys)
            && blocks.is_some_and(fits);
        let options = a.window.is_none() && a.key_lengths.is_none() && a.dropout.is_none();
        if !(sizes && options && matches!(dtype, DType::F32 | DType::BF16 | DType::F16)) {
            return Ok(false);
        }
        if a.products.any() {
            return attention_fp8::supports(a, dtype, device);
        }
        Ok(a.operands.is_none_or(|operands| {
            operands == dtype || (dtype, operands) == (DType::F32, DType::BF16)
        }))
    }

    fn needs_result(&self) -> bool {
        true
    }

    fn forward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        out_dtype: DType,
    ) -> Result<(Storage, Tensor)> {
        let [q, k, v] = operands(attention, qkv)?;
        if q.dtype() != out_dtype {
            let (y, lse) = self.forward(attention, [&q, &k, &v], q.dtype())?;
            let y = tensor_of(y, q.shape())?.to_dtype(out_dtype)?;
            return Ok((take_storage(y)?, lse));
        }
        let qkv = [&q, &k, &v];
        let gpu = Gpu::of(qkv[0])?;
        let inputs = [readable(qkv[0])?, readable(qkv[1])?, readable(qkv[2])?];
        let q = &inputs[0];
        let scale_log2 = softmax_scale_log2(attention);
        let (kernel, shape) =
            match attention_wgmma::forward(&gpu, attention, q.dtype(), scale_log2)? {
                Some(launch) => launch,
                None => forward_launch(attention, q.dtype())?,
            };
        let out = gpu.alloc(q.dtype(), q.elem_count())?;
        let statistics = (attention.pairs(), statistics_row(attention));
        let lse = gpu.alloc(DType::F32, statistics.0 * statistics.1)?;
        with_view_pointers(&gpu, &inputs.each_ref(), |pointers| {
            let mut args: Vec<Arg> = pointers.iter().copied().map(Arg::Ptr).collect();
            args.extend([Arg::Ptr(out.ptr()), Arg::Ptr(lse.ptr())]);
            for x in &inputs {
                args.extend(strides(attention, x.stride()));
            }
            args.extend(strides(attention, Layout::contiguous(q.shape()).stride()));
            args.extend(sizes(attention));
            args.push(Arg::Float(scale_log2));
            // SAFETY: q, k and v have the shapes of `attention`, unit stride in the last dimension and 16-byte aligned rows;
            // `out` is as large as q, `lse` has a padded row per batch and head. The kernel bounds rows and columns by the
            // sizes it is given.
            unsafe { launch(&gpu, &kernel, shape, &args) }
        })?;
        Ok((out.into_storage(), lse.into_tensor(statistics)?))
    }

    fn backward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        (out, lse): (Option<&Tensor>, &Tensor),
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let Some(out) = out else {
            internal!("this backward pass needs the result of the forward pass");
        };
        let [q, k, v] = operands(attention, qkv)?;
        let qkv = [&q, &k, &v];
        let grad_dtype = grad.dtype();
        let (out, grad) = (out.to_dtype(q.dtype())?, grad.to_dtype(q.dtype())?);
        let gpu = Gpu::of(&grad)?;
        let grad = readable(&grad)?;
        let delta = delta(&gpu, attention, &out, &grad)?;
        let pass = Backward {
            gpu,
            attention,
            inputs: [
                readable(qkv[0])?,
                readable(qkv[1])?,
                readable(qkv[2])?,
                grad,
            ],
            statistics: [lse, &delta],
        };
        let mut gradients = [None, None, None];
        if wanted[1] || wanted[2] {
            let [dk, dv] = pass.kv()?;
            gradients[1] = wanted[1].then_some(dk);
            gradients[2] = wanted[2].then_some(dv);
        }
        if wanted[0] {
            gradients[0] = Some(pass.q()?);
        }
        for gradient in gradients.iter_mut().flatten() {
            *gradient = gradient.to_dtype(grad_dtype)?;
        }
        Ok(gradients)
    }

    fn forward_fp8(
        &self,
        attention: &Attention,
        qkv: [Operand<'_>; 3],
        [_, out_dtype]: [DType; 2],
    ) -> Result<(Storage, Tensor)> {
        let [q, k, v] = &attention_fp8::operands(qkv)?;
        if attention.products.values {
            return attention_fp8::forward(attention, [q, k, v], out_dtype);
        }
        // P is rounded to bf16, as it is without FP8.
        let plain = Attention {
            operands: None,
            ..attention.clone()
        };
        self.forward(&plain, [q, k, v], out_dtype)
    }

    fn backward_fp8(
        &self,
        attention: &Attention,
        operands: BackwardOperands<'_>,
        lse: &Tensor,
        [_, out_dtype]: [DType; 2],
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        attention_fp8::backward(attention, operands, lse, out_dtype, wanted)
    }
}

/// The kernel of a forward pass on `mma.sync`, and its launch.
fn forward_launch(attention: &Attention, dtype: DType) -> Result<(Kernel, Shape)> {
    let kernel = ForHeads::of(attention, &[FORWARD_64, FORWARD_128], dtype)?;
    let (queries, keys) = match kernel.element {
        2 => (ROWS.1, 64),
        _ => (ROWS.0, 32),
    };
    // A tile of queries, two stages of a tile of keys and a tile of values.
    let blocks = attention.pairs() * attention.queries.div_ceil(queries);
    let shape = kernel.shape(blocks, THREADS, queries + 4 * keys, 0);
    Ok((kernel.kernel, shape))
}

/// The kernel of the gradients of keys and values on `mma.sync`, and its launch.
fn backward_kv_launch(attention: &Attention, dtype: DType) -> Result<(Kernel, Shape)> {
    let kernel = ForHeads::of(attention, &[BACKWARD_KV_64, BACKWARD_KV_128], dtype)?;
    // Keys of a block, queries of a stage, pairs of warps, and probabilities that these exchange.
    let (keys, queries, pairs, exchanged) = match (kernel.element, kernel.head_dim) {
        (2, 128) => (128, 64, 4, 2 * 4 * 32 * 32),
        (2, _) => (128, 64, 2, 2 * 2 * 64 * 16),
        _ => (32, 16, 2, 2 * 16 * 16),
    };
    let blocks = attention.batch * attention.kv_heads * attention.keys.div_ceil(keys);
    // Two stages of q, its gradient and two statistics; keys and values beside them, or in their place until they are in registers.
    let beside = if kernel.element == 2 { 0 } else { 2 * keys };
    let (rows, floats) = (beside + 4 * queries, 4 * queries + exchanged);
    let shape = kernel.shape(blocks, 64 * pairs, rows, floats);
    Ok((kernel.kernel, shape))
}

/// The kernel of the gradient of queries on `mma.sync`, and its launch.
fn backward_q_launch(attention: &Attention, dtype: DType) -> Result<(Kernel, Shape)> {
    let kernel = ForHeads::of(attention, &[BACKWARD_Q_64, BACKWARD_Q_128], dtype)?;
    // Queries of a block, its threads, rows of two stages of keys and values with, where they are not in registers, q and the
    // result's gradient, and what warps exchange: two buffers of 32 keys by 128 queries of 2 bytes.
    let (queries, threads, rows, floats) = match (kernel.element, kernel.head_dim) {
        (2, 128) => (ROWS.1, 2 * THREADS, 4 * 64, 2 * 32 * 128 / 2),
        (2, _) => (ROWS.1, THREADS, 4 * 64, 0),
        _ => (ROWS.0, THREADS, 2 * ROWS.0 + 4 * 16, 0),
    };
    let blocks = attention.pairs() * attention.queries.div_ceil(queries);
    let shape = kernel.shape(blocks, threads, rows, floats);
    Ok((kernel.kernel, shape))
}

/// q, k and v in the dtype of the operands of products.
fn operands(attention: &Attention, qkv: [&Tensor; 3]) -> Result<[Tensor; 3]> {
    let [q, k, v] = qkv.map(|x| x.to_dtype(attention.operands.unwrap_or(x.dtype())));
    Ok([q?, k?, v?])
}

/// Sums of gradient times result per query, f32 `[batch * heads, statistics_row]`.
fn delta(gpu: &Gpu, attention: &Attention, out: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let out = readable(out)?;
    let (pairs, row) = (attention.pairs(), statistics_row(attention));
    let delta = gpu.alloc(DType::F32, pairs * row)?;
    with_view_pointers(gpu, &[&out, grad], |pointers| {
        let mut args: Vec<Arg> = pointers.iter().copied().map(Arg::Ptr).collect();
        args.push(Arg::Ptr(delta.ptr()));
        args.extend(strides(attention, out.stride()));
        args.extend(strides(attention, grad.stride()));
        args.push(Arg::Len((pairs * row) as u64));
        args.extend([attention.heads, attention.queries, attention.head_dim].map(int));
        const LANES_PER_ROW: usize = 16;
        let shape = Shape::blocks(
            (pairs * row * LANES_PER_ROW).div_ceil(THREADS),
            THREADS as u32,
        );
        // SAFETY: both tensors have q's shape, unit stride in the last dimension and 16-byte aligned rows; `delta` has a
        // padded row per batch and head.
        unsafe { launch(gpu, DELTA.of(NAME, out.dtype())?, shape, &args) }
    })?;
    delta.into_tensor((pairs, row))
}

/// What the two kernels of a backward pass read.
struct Backward<'a> {
    gpu: Gpu,
    attention: &'a Attention,
    /// q, k, v and the gradient of the result.
    inputs: [Tensor; 4],
    /// Log-sum-exps and deltas.
    statistics: [&'a Tensor; 2],
}

impl Backward<'_> {
    fn kv(&self) -> Result<[Tensor; 2]> {
        let (k, v, a) = (&self.inputs[1], &self.inputs[2], self.attention);
        let (kernel, shape) = match attention_wgmma::backward_kv(&self.gpu, a, k.dtype())? {
            Some(launch) => launch,
            None => backward_kv_launch(a, k.dtype())?,
        };
        let dk = self.gpu.alloc(k.dtype(), k.elem_count())?;
        let dv = self.gpu.alloc(v.dtype(), v.elem_count())?;
        // SAFETY: k and v have the same shape, and so do these.
        unsafe { self.launch(&kernel, shape, &[&dk, &dv], k) }?;
        Ok([dk.into_tensor(k.shape())?, dv.into_tensor(v.shape())?])
    }

    fn q(&self) -> Result<Tensor> {
        let (q, a) = (&self.inputs[0], self.attention);
        let (kernel, shape) = match attention_wgmma::backward_q(&self.gpu, a, q.dtype())? {
            Some(launch) => launch,
            None => backward_q_launch(a, q.dtype())?,
        };
        let dq = self.gpu.alloc(q.dtype(), q.elem_count())?;
        // SAFETY: dq is as large as q.
        unsafe { self.launch(&kernel, shape, &[&dq], q) }?;
        dq.into_tensor(q.shape())
    }

    /// # Safety
    /// `results` are the outputs of `kernel`, with the shape and dtype of `like`.
    unsafe fn launch(
        &self,
        kernel: &Kernel,
        shape: Shape,
        results: &[&Buffer],
        like: &Tensor,
    ) -> Result<()> {
        let [q, k, v, grad] = &self.inputs;
        let [lse, delta] = self.statistics;
        with_view_pointers(&self.gpu, &[q, k, v, grad, lse, delta], |pointers| {
            let mut args: Vec<Arg> = pointers.iter().copied().map(Arg::Ptr).collect();
            for x in &self.inputs {
                args.extend(strides(self.attention, x.stride()));
            }
            args.extend(sizes(self.attention));
            args.push(Arg::Float(softmax_scale_log2(self.attention)));
            args.push(Arg::Float(self.attention.softmax_scale as f32));
            args.extend(results.iter().map(|result| Arg::Ptr(result.ptr())));
            args.extend(strides(
                self.attention,
                Layout::contiguous(like.shape()).stride(),
            ));
            // SAFETY: the inputs have the shapes of `attention`, unit stride in the last dimension and 16-byte aligned rows;
            // the statistics have a padded row per batch and head; the caller guarantees the results.
            unsafe { launch(&self.gpu, kernel, shape, &args) }
        })
    }
}

/// The kernel compiled for the next larger head size.
struct ForHeads {
    kernel: Kernel,
    head_dim: usize,
    /// Bytes per element.
    element: usize,
}

impl ForHeads {
    fn of(attention: &Attention, kernels: &[FloatKernels; 2], dtype: DType) -> Result<Self> {
        let (kernels, head_dim) = match attention.head_dim {
            ..=64 => (&kernels[0], 64),
            _ => (&kernels[1], 128),
        };
        Ok(Self {
            kernel: *kernels.of(NAME, dtype)?,
            head_dim,
            element: dtype.size_in_bytes(),
        })
    }

    /// Blocks of `threads`, with shared memory for `rows` rows of elements and `floats` f32.
    fn shape(&self, blocks: usize, threads: usize, rows: usize, floats: usize) -> Shape {
        Shape {
            shared: (rows * self.head_dim * self.element + floats * size_of::<f32>()) as u32,
            ..Shape::blocks(blocks, threads as u32)
        }
    }
}
