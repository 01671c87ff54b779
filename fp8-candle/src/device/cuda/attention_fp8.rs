//! Attention with products in FP8, which Hopper alone has kernels for. They read operands in bf16, in which the values of codes are exact,
//! and round P and dS in registers.

use super::attention_args::{int, readable, sizes, softmax_scale_log2, statistics_row, strides};
use super::attention_wgmma::{
    BACKWARD_GROUPS, BACKWARD_STEP, Launch, ROWS, SLOTS, backward_elements, for_heads, runs, shape,
};
use super::codes::dequantize;
use super::gpu::{Buffer, Gpu, with_view_pointers};
use super::kernels::{Arg, Shape, kernels};
use super::launch::launch;
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::{BackwardOperands, Operand};
use crate::base::data::matrix_dims;
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Result, internal};
use candle_core::{DType, Device, Layout, Storage, Tensor};
use fp8_core::{Format, ScaleGrid};

kernels! { ROUND_ROWS_KERNELS in ROUND_ROWS;
    ROUND = floats "fp8_round_rows"("ppllllllifff");
}

kernels! { ATTENTION_FORWARD_FP8_KERNELS in ATTENTION_FORWARD_FP8;
    FORWARD_64 = one "fp8_attention_forward_fp8_d64"("ppppplllllllllllliiiiiififff");
    FORWARD_128 = one "fp8_attention_forward_fp8_d128"("ppppplllllllllllliiiiiififff");
}

kernels! { ATTENTION_BACKWARD_Q_FP8_KERNELS in ATTENTION_BACKWARD_Q_FP8;
    BACKWARD_Q_64 = one "fp8_attention_backward_q_fp8_d64"("pppplllllllllllliiiiiiffffffffpppllli");
    BACKWARD_Q_128 = one "fp8_attention_backward_q_fp8_d128"("pppplllllllllllliiiiiiffffffffpppllli");
}

kernels! { ATTENTION_BACKWARD_KV_FP8_KERNELS in ATTENTION_BACKWARD_KV_FP8;
    BACKWARD_KV_64 = one "fp8_attention_backward_kv_fp8_d64"("pppplllllllllllliiiiiiffffffffpppllli");
    BACKWARD_KV_128 = one "fp8_attention_backward_kv_fp8_d128"("pppplllllllllllliiiiiiffffffffpppllli");
}

/// Whether `device` has kernels for a call with FP8 products, whose sizes and other options fit: a chip and code of 9.0a. Each of q, k, v
/// and the gradient has one set of values for all its uses in a pass, which is exact in bf16. Elsewhere these calls are composed.
pub(super) fn supports(attention: &Attention, dtype: DType, device: &Device) -> Result<bool> {
    let products = attention.products;
    let one_set = products.scores && products.grad_probabilities && products.grad_inputs;
    let scale_log2 = softmax_scale_log2(attention);
    let exact = attention.exact_in_bf16(dtype) == [true; 2];
    if !one_set || !exact || scale_log2.is_nan() || scale_log2 <= 0.0 {
        return Ok(false);
    }
    let gpu = Gpu::new(device)?;
    for kernel in [FORWARD_64, BACKWARD_Q_64, BACKWARD_KV_64] {
        if !runs(&gpu, &kernel, DType::BF16)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Operands as the kernels read them.
pub(super) fn operands<const N: usize>(operands: [Operand<'_>; N]) -> Result<[Tensor; N]> {
    let mut values = Vec::with_capacity(N);
    for operand in operands {
        values.push(match operand {
            Operand::Values(x) => readable(&x.to_dtype(DType::BF16)?)?,
            Operand::Rounded(x, format) => round_rows(x, format)?,
            Operand::Codes {
                codes,
                dequant_scale,
                format,
            } => {
                let (rows, cols) = matrix_dims(codes.dims());
                let grid = ScaleGrid::per_row(rows, cols);
                dequantize(codes, format, &grid, dequant_scale, DType::BF16)?
            }
        });
    }
    match values.try_into() {
        Ok(values) => Ok(values),
        Err(_) => internal!("{N} operands of attention have other values"),
    }
}

/// The values of the codes of `x`, in bf16, contiguous.
fn round_rows(x: &Tensor, format: Format) -> Result<Tensor> {
    const LANES_PER_ROW: usize = 16;
    const THREADS: usize = 256;
    let x = readable(x)?;
    let gpu = Gpu::of(&x)?;
    let out = gpu.alloc(DType::BF16, x.elem_count())?;
    let (_, middle, last, cols) = x.dims4()?;
    let rows = x.elem_count() / cols;
    with_view_pointers(&gpu, &[&x], |pointers| {
        let mut args: Vec<Arg> = pointers.iter().copied().map(Arg::Ptr).collect();
        args.push(Arg::Ptr(out.ptr()));
        args.extend([rows, middle, last].map(|n| Arg::Len(n as u64)));
        args.extend(x.stride()[..3].iter().map(|&n| Arg::Len(n as u64)));
        args.push(int(cols));
        args.extend(steps(format));
        let shape = Shape::blocks((rows * LANES_PER_ROW).div_ceil(THREADS), THREADS as u32);
        // SAFETY: x has these sizes and strides, with rows that begin at multiples of 16 bytes and have at most 128 values, a multiple of
        // 8; `out` has as many elements.
        unsafe { launch(&gpu, ROUND.of("attention", x.dtype())?, shape, &args) }
    })?;
    out.into_tensor(x.shape())
}

/// What rounding needs of a format: `Steps` of `kernels/nearest.cuh`.
fn steps(format: Format) -> [Arg; 3] {
    let to_large = 1.5 * (1u32 << (23 - format.mantissa_bits())) as f32;
    [format.max(), format.min_normal(), to_large].map(Arg::Float)
}

/// Memory for results like `x` that become `dtype`: kernels write bf16 and f32.
fn results(gpu: &Gpu, dtype: DType, x: &Tensor) -> Result<(Buffer, Arg)> {
    let (dtype, wide) = match dtype {
        DType::BF16 => (DType::BF16, 0),
        _ => (DType::F32, 1),
    };
    Ok((gpu.alloc(dtype, x.elem_count())?, Arg::Int(wide)))
}

/// The result in `out_dtype` and the log-sum-exps, from operands that [`operands`] has made.
pub(super) fn forward(
    attention: &Attention,
    [q, k, v]: [&Tensor; 3],
    out_dtype: DType,
) -> Result<(Storage, Tensor)> {
    // Queries of a block, and keys of a step.
    const QUERIES: usize = 2 * ROWS;
    const KEYS: usize = 128;
    let gpu = Gpu::of(q)?;
    let (kernel, head_dim) = for_heads(attention, [FORWARD_64, FORWARD_128]);
    let blocks = attention.pairs() * attention.queries.div_ceil(QUERIES);
    let shape = shape(
        blocks,
        QUERIES / ROWS,
        (QUERIES + SLOTS * KEYS) * head_dim,
        0,
    );
    let (out, wide) = results(&gpu, out_dtype, q)?;
    let statistics = (attention.pairs(), statistics_row(attention));
    let lse = gpu.alloc(DType::F32, statistics.0 * statistics.1)?;
    with_view_pointers(&gpu, &[q, k, v], |pointers| {
        let mut args: Vec<Arg> = pointers.iter().copied().map(Arg::Ptr).collect();
        args.extend([Arg::Ptr(out.ptr()), Arg::Ptr(lse.ptr())]);
        for x in [q, k, v] {
            args.extend(strides(attention, x.stride()));
        }
        args.extend(strides(attention, Layout::contiguous(q.shape()).stride()));
        args.extend(sizes(attention));
        args.extend([Arg::Float(softmax_scale_log2(attention)), wide]);
        args.extend(steps(attention.products.format));
        // SAFETY: q, k and v are bf16 and have the shapes of `attention`, unit stride in the last dimension and 16-byte aligned rows;
        // `out` is as large as q, `lse` has a padded row per batch and head. The kernel bounds rows and columns by the sizes it is given.
        unsafe { launch(&gpu, &kernel, shape, &args) }
    })?;
    let lse = lse.into_tensor(statistics)?;
    let y = tensor_of(out.into_storage(), q.shape())?.to_dtype(out_dtype)?;
    Ok((take_storage(y)?, lse))
}

/// The gradients that are `wanted`, in `out_dtype`.
pub(super) fn backward(
    attention: &Attention,
    parts: BackwardOperands<'_>,
    lse: &Tensor,
    out_dtype: DType,
    wanted: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    // `supports` has made sure that `grad_inputs` reads the same values.
    let ([q, k], [grad, v]) = (parts.scores, parts.grad_probabilities);
    let pass = Backward {
        attention,
        inputs: operands([q, k, v, grad])?,
        out_dtype,
    };
    let gpu = Gpu::of(lse)?;
    let len = 4 * attention.pairs() * attention.queries;
    let statistics = gpu.alloc(DType::F32, len)?;
    let dq = pass.q(&gpu, lse, &statistics)?;
    let statistics = statistics.into_tensor(len)?;
    let mut gradients = [wanted[0].then_some(dq), None, None];
    if wanted[1] || wanted[2] {
        let [dk, dv] = pass.kv(&gpu, &statistics)?;
        gradients[1] = wanted[1].then_some(dk);
        gradients[2] = wanted[2].then_some(dv);
    }
    for gradient in gradients.iter_mut().flatten() {
        *gradient = gradient.to_dtype(out_dtype)?;
    }
    Ok(gradients)
}

/// What both kernels of a backward pass read.
struct Backward<'a> {
    attention: &'a Attention,
    /// q, k, v and the gradient of the result.
    inputs: [Tensor; 4],
    out_dtype: DType,
}

impl Backward<'_> {
    /// The gradient of queries. Writes the statistics of each query, four f32.
    fn q(&self, gpu: &Gpu, lse: &Tensor, statistics: &Buffer) -> Result<Tensor> {
        let (q, a) = (&self.inputs[0], self.attention);
        let (kernel, head_dim) = for_heads(a, [BACKWARD_Q_64, BACKWARD_Q_128]);
        let blocks = a.pairs() * a.queries.div_ceil(BACKWARD_GROUPS * ROWS);
        let shape = shape(blocks, BACKWARD_GROUPS, backward_elements(head_dim), 0);
        let (dq, wide) = results(gpu, self.out_dtype, q)?;
        with_view_pointers(gpu, &[lse], |pointers| {
            let written = [statistics.ptr(), dq.ptr()];
            let pointers = [pointers, &written].concat();
            // SAFETY: there is a log-sum-exp in a padded row and 16 bytes of statistics for each query, and dq is as large as q.
            unsafe { self.launch(gpu, (kernel, shape), &pointers, q, wide) }
        })?;
        dq.into_tensor(q.shape())
    }

    /// The gradients of keys and values, from what [`Backward::q`] has left.
    fn kv(&self, gpu: &Gpu, statistics: &Tensor) -> Result<[Tensor; 2]> {
        let (k, v, a) = (&self.inputs[1], &self.inputs[2], self.attention);
        let (kernel, head_dim) = for_heads(a, [BACKWARD_KV_64, BACKWARD_KV_128]);
        let tiles = a.keys.div_ceil(BACKWARD_GROUPS * ROWS);
        // Each slot has four statistics of its queries too.
        let floats = SLOTS * 4 * BACKWARD_STEP;
        let shape = shape(
            a.batch * a.kv_heads * tiles,
            BACKWARD_GROUPS,
            backward_elements(head_dim),
            floats,
        );
        let ((dk, wide), (dv, _)) = (
            results(gpu, self.out_dtype, k)?,
            results(gpu, self.out_dtype, v)?,
        );
        with_view_pointers(gpu, &[statistics], |pointers| {
            let pointers = [pointers, &[dk.ptr(), dv.ptr()]].concat();
            // SAFETY: there are 16 bytes of statistics for each query, and k and v have the same shape, and so do their gradients.
            unsafe { self.launch(gpu, (kernel, shape), &pointers, k, wide) }
        })?;
        Ok([dk.into_tensor(k.shape())?, dv.into_tensor(v.shape())?])
    }

    /// # Safety
    /// `pointers` are what the kernel takes behind the arguments of both: statistics, and results with the shape of `like`.
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        (kernel, shape): Launch,
        pointers: &[u64],
        like: &Tensor,
        wide: Arg,
    ) -> Result<()> {
        let a = self.attention;
        with_view_pointers(gpu, &self.inputs.each_ref(), |inputs| {
            let mut args: Vec<Arg> = inputs.iter().copied().map(Arg::Ptr).collect();
            for x in &self.inputs {
                args.extend(strides(a, x.stride()));
            }
            args.extend(sizes(a));
            args.push(Arg::Float(softmax_scale_log2(a)));
            args.push(Arg::Float(a.softmax_scale as f32));
            args.extend(steps(a.products.format));
            args.extend(steps(a.products.grad_format));
            args.extend(pointers.iter().copied().map(Arg::Ptr));
            args.extend(strides(a, Layout::contiguous(like.shape()).stride()));
            args.push(wide);
            // SAFETY: the inputs are bf16 and have the shapes of `attention`, unit stride in the last dimension and 16-byte aligned rows;
            // the caller guarantees the rest.
            unsafe { launch(gpu, &kernel, shape, &args) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::data::attention_products::AttentionProducts;
    use crate::device::cuda::attention_args::example;
    use crate::device::fused_attention;

    fn attention(products: AttentionProducts) -> Attention {
        Attention {
            products,
            ..example(1 << 20, 128)
        }
    }

    /// A chip of 9.0 with code of 9.0a has kernels where each tensor has one set of values, and none elsewhere.
    #[test]
    fn hopper_has_kernels_for_all_products() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            return Ok(());
        }
        let hopper = runs(&Gpu::new(&device)?, &FORWARD_64, DType::BF16)?;
        let Some(kernels) = fused_attention(&device) else {
            internal!("this device has kernels");
        };
        let all = AttentionProducts::all();
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        let chosen = |a: &Attention| -> Result<Vec<bool>> {
            let of = |dtype| kernels.supports(a, dtype, &device);
            dtypes.into_iter().map(of).collect()
        };
        assert_eq!(chosen(&attention(all))?, [hopper; 3]);
        // Then v is an operand in high precision, which is exact in bf16 if it is bf16.
        let values = attention(all.with_values(false));
        assert_eq!(chosen(&values)?, [false, hopper, false]);
        let in_bf16 = Attention {
            operands: Some(DType::BF16),
            ..values
        };
        assert_eq!(chosen(&in_bf16)?, [hopper; 3]);
        for products in [
            all.with_scores(false),
            all.with_grad_probabilities(false),
            all.with_grad_inputs(false),
        ] {
            assert_eq!(chosen(&attention(products))?, [false; 3], "{products}");
        }
        let negative = Attention {
            softmax_scale: -0.1,
            ..attention(all)
        };
        assert_eq!(chosen(&negative)?, [false; 3]);
        assert!(!kernels.supports(&attention(all), DType::F64, &device)?);
        Ok(())
    }
}
