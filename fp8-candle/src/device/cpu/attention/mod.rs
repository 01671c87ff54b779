//! Attention in tiles: for each block of queries the scores of the keys that it sees, in a buffer of that many rows, then the
//! softmax in f32, then the sum of the values. Products run on tiles or units of bf16, or in f32.
//!
//! A block is worked on by one thread, and the division into tasks depends on the sizes alone, so that results are the same for
//! any number of threads.
//!
//! The result of a query does not depend on the queries beside it, nor on keys that it does not see: the sum over features is
//! one chain (on tiles, of sums of 16 pairs), and sums over keys go by their places in the sequence, with weights of exactly 0 for keys that are hidden. So a
//! few queries over a cache (`few.rs`) give what they give among all queries of the sequence.

#[cfg(target_arch = "x86_64")]
mod amx_units;
mod backward;
mod block;
mod cached;
mod cast;
mod choose;
mod f32_units;
mod few;
mod forward;
mod layout;
mod output;
mod pack;
mod rows;
mod source;
mod split;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod tile_amx;
mod units;
#[cfg(target_arch = "x86_64")]
mod words;
#[cfg(target_arch = "x86_64")]
mod x86_units;

pub(crate) use cached::cached;

use super::elements::{Element, for_narrow, storage, tensor, with_scales};
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::{BackwardOperands, Operand};
use crate::base::error::{Result, internal};
use crate::device::backend::FusedAttention;
use backward::Views;
use candle_core::{DType, Device, Storage, Tensor};
use choose::with_units;
use output::Output;
use source::{View, with_views};

/// The kernels of this folder.
pub(crate) struct CpuAttention;

impl FusedAttention for CpuAttention {
    fn supports(&self, _: &Attention, dtype: DType, _: &Device) -> Result<bool> {
        Ok(matches!(dtype, DType::F32 | DType::BF16 | DType::F16))
    }

    fn needs_result(&self) -> bool {
        false
    }

    fn forward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        out_dtype: DType,
    ) -> Result<(Storage, Tensor)> {
        let dtypes = [qkv[0].dtype(), out_dtype];
        self.forward_fp8(attention, qkv.map(Operand::Values), dtypes)
    }

    fn backward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        (_, lse): (Option<&Tensor>, &Tensor),
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let dtypes = [qkv[0].dtype(), grad.dtype()];
        let ([q, k, v], grad) = (qkv.map(Operand::Values), Operand::Values(grad));
        let operands = BackwardOperands {
            scores: [q, k],
            grad_probabilities: [grad, v],
            grad_inputs: [q, k, grad],
        };
        self.backward_fp8(attention, operands, lse, dtypes, wanted)
    }

    fn forward_fp8(
        &self,
        attention: &Attention,
        qkv: [Operand<'_>; 3],
        [dtype, out_dtype]: [DType; 2],
    ) -> Result<(Storage, Tensor)> {
        let [in_bf16, _] = attention.exact_in_bf16(dtype);
        with_views(attention, qkv, |views| {
            for_narrow!("attention", "the result", out_dtype, T => {
                forward::<T>(attention, in_bf16, views)
            })
        })
    }

    fn backward_fp8(
        &self,
        attention: &Attention,
        operands: BackwardOperands<'_>,
        lse: &Tensor,
        [dtype, out_dtype]: [DType; 2],
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let [_, in_bf16] = attention.exact_in_bf16(dtype);
        let ([q, k], [grad, v]) = (operands.scores, operands.grad_probabilities);
        let [q_values, k_values, grad_values] = operands.grad_inputs;
        let all = [q, k, grad, v, q_values, k_values, grad_values];
        with_scales("attention", lse, |lse| {
            with_views(
                attention,
                all,
                |[q, k, grad, v, q_values, k_values, grad_values]| {
                    let views = Views {
                        scores: [q, k],
                        grad_probabilities: [grad, v],
                        grad_inputs: [q_values, k_values, grad_values],
                    };
                    for_narrow!("attention", "the result", out_dtype, T => {
                        backward::<T>(attention, in_bf16, views, lse, wanted)
                    })
                },
            )
        })
    }
}

fn forward<T: Element>(
    attention: &Attention,
    in_bf16: bool,
    views: [View<'_>; 3],
) -> Result<(Storage, Tensor)> {
    let Attention {
        batch,
        heads,
        queries,
        ..
    } = *attention;
    let mut lse = vec![0f32; batch * heads * queries];
    let len = output::len(attention, [heads, queries]);
    let mut result = Vec::<T>::with_capacity(len);
    let output = Output::of(&mut result, attention, [heads, queries]);
    with_units!(in_bf16, units => {
        forward::forward(units, attention, views, output, &mut lse);
    });
    // SAFETY: the pass has written every query of every head.
    unsafe { result.set_len(len) };
    let lse = tensor(lse, (batch, heads, queries))?;
    Ok((storage(result), lse))
}

fn backward<T: Element>(
    attention: &Attention,
    in_bf16: bool,
    views: Views<'_>,
    lse: &[f32],
    wanted: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let Attention {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        ..
    } = *attention;
    if lse.len() != batch * heads * queries {
        internal!("{} log-sum-exps of attention", lse.len());
    }
    let sizes = [[heads, queries], [kv_heads, keys], [kv_heads, keys]];
    let mut results: [Vec<T>; 3] = std::array::from_fn(|i| match wanted[i] {
        true => Vec::with_capacity(output::len(attention, sizes[i])),
        false => Vec::new(),
    });
    let mut outputs = [None, None, None];
    for (i, values) in results.iter_mut().enumerate() {
        outputs[i] = wanted[i].then(|| Output::of(values, attention, sizes[i]));
    }
    with_units!(in_bf16, units => {
        backward::backward(units, attention, views, lse, outputs);
    });
    let mut gradients = [None, None, None];
    let shapes = attention.shapes();
    for (i, mut values) in results.into_iter().enumerate() {
        if wanted[i] {
            // SAFETY: the pass has written every row.
            unsafe { values.set_len(output::len(attention, sizes[i])) };
            gradients[i] = Some(tensor(values, shapes[i.min(1)].as_slice())?);
        }
    }
    Ok(gradients)
}
