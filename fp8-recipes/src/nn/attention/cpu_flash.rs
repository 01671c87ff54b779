//! `candle_nn::attention::cpu_flash`, differentiable.

use super::scores::{Scores, bias, causal_bias};
use super::varlen::packed_attention;
use super::{AttnMask, tracked};
use candle_core::{DType, Result, Tensor, WithDType};

/// Attention of tensors with tokens before heads: `candle_nn::attention::flash_attn`, differentiable in `q`, `k` and `v`.
///
/// `softmax(q k^T * softmax_scale) v` over the keys that `attn_mask` does not hide; `softcap` bounds the products, `max_bias` adds
/// ALiBi.
///
/// # Shapes
/// `q` `[b, tq, h, d]`, `k` and `v` `[b, tk, h_kv, d]` with `h` a multiple of `h_kv`; a mask has `tq * tk` values, the same for all rows
/// of the batch and all heads. Result `[b, h, tq, d]`, in f32 for a
/// batch of one, as candle-nn's.
///
/// # Errors
/// If the shapes are incompatible. Where no gradient is tracked, also where candle-nn's kernel has a limit.
pub fn flash_attn<T>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    attn_mask: AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor>
where
    T: WithDType + num_traits::Float,
{
    let mask = match &attn_mask {
        AttnMask::Mask(mask) => Some(mask),
        _ => None,
    };
    if let Some(mask) = mask {
        check_mask(mask, q, k)?;
    }
    if !tracked(&[q, k, v]) && !mask.is_some_and(Tensor::track_op) {
        return candle_nn::attention::flash_attn::<T>(
            q,
            k,
            v,
            softmax_scale,
            attn_mask,
            max_bias,
            softcap,
        );
    }
    let (batch, tq, heads, _) = q.dims4()?;
    let tk = k.dim(1)?;
    let device = q.device();
    // The position of query 0 among the keys.
    let first = match &attn_mask {
        AttnMask::Causal { kv_offset } if batch == 1 && tq > 1 => *kv_offset as i64,
        _ => tk as i64 - tq as i64,
    };
    if batch > 1 && attn_mask.is_causal() && tk < tq {
        candle_core::bail!("causal attention of {tq} queries over {tk} keys");
    }
    let slopes = slopes(max_bias, heads);
    let causal = attn_mask.is_causal();
    let mut biases = vec![];
    if causal {
        biases.push(causal_bias((tq, tk), first, device)?);
    }
    match (&attn_mask, &slopes) {
        (AttnMask::Mask(mask), slopes) => {
            // candle-nn lets ALiBi scale the mask.
            let mask = mask.reshape((1, tq, tk))?.to_dtype(DType::F32)?;
            biases.push(match slopes {
                None => mask,
                Some(slopes) => {
                    let slopes = Tensor::new(slopes.as_slice(), device)?;
                    mask.broadcast_mul(&slopes.reshape((heads, 1, 1))?)?
                }
            });
        }
        (_, Some(slopes)) if causal || batch > 1 => {
            biases.push(bias((heads, tq, tk), device, |head, i, j| {
                -slopes[head] * (i + first - j).abs() as f32
            })?);
        }
        _ => {}
    }
    let scores = Scores {
        scale: softmax_scale.into(),
        softcap: softcap.filter(|&cap| cap != 0.).map(f64::from),
        bias: biases,
    };
    let y = scores.attend(
        &q.transpose(1, 2)?,
        &k.transpose(1, 2)?,
        &v.transpose(1, 2)?,
    )?;
    match batch {
        1 => y.to_dtype(DType::F32),
        _ => y.to_dtype(q.dtype()),
    }
}

/// Fails for a mask of other sizes: candle-nn reads its first `tq * tk` values, so that of further heads or rows of a batch would have no
/// effect.
fn check_mask(mask: &Tensor, q: &Tensor, k: &Tensor) -> Result<()> {
    let (tq, tk) = (q.dim(1)?, k.dim(1)?);
    match mask.elem_count() == tq * tk {
        true => Ok(()),
        false => Err(fp8_candle::Error::Shape {
            op: "flash_attn",
            what: "the mask",
            expected: format!("[{tq}, {tk}], for all heads and rows of the batch"),
            got: mask.dims().to_vec(),
        }
        .into()),
    }
}

/// The ALiBi slope of each head.
fn slopes(max_bias: Option<f32>, heads: usize) -> Option<Vec<f32>> {
    let max_bias = max_bias.filter(|&max_bias| max_bias > 0.)?;
    let power = heads.next_power_of_two() as f32;
    let slope = |head: usize| 2f32.powf(-max_bias * (head + 1) as f32 / power);
    Some((0..heads).map(slope).collect())
}

/// A batch of one, with a mask or none.
pub mod standard {
    use super::{AttnMask, Result, Tensor, WithDType};

    /// `candle_nn::attention::cpu_flash::standard::run_flash_attn_cpu`, differentiable; see [`super::flash_attn`].
    ///
    /// # Errors
    /// If the batch is not one, or the shapes are incompatible.
    pub fn run_flash_attn_cpu<T>(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
        softmax_scale: f32,
        max_bias: Option<f32>,
        softcap: Option<f32>,
    ) -> Result<Tensor>
    where
        T: WithDType + num_traits::Float,
    {
        super::one_batch(q)?;
        let mask = mask.map_or(AttnMask::None, |mask| AttnMask::Mask(mask.clone()));
        super::flash_attn::<T>(q, k, v, softmax_scale, mask, max_bias, softcap)
    }
}

/// A batch of one, causal.
pub mod causal {
    pub use candle_nn::attention::cpu_flash::causal::causal_decode_f32_interleaved;

    use super::{AttnMask, Result, Tensor, WithDType};

    /// `candle_nn::attention::cpu_flash::causal::run_causal_attn_cpu`, differentiable; see [`super::flash_attn`].
    ///
    /// # Errors
    /// If the batch is not one, or the shapes are incompatible.
    pub fn run_causal_attn_cpu<T>(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        softmax_scale: f32,
        kv_offset: usize,
        max_bias: Option<f32>,
        softcap: Option<f32>,
    ) -> Result<Tensor>
    where
        T: WithDType + num_traits::Float,
    {
        super::one_batch(q)?;
        let mask = AttnMask::causal_with_offset(kv_offset);
        super::flash_attn::<T>(q, k, v, softmax_scale, mask, max_bias, softcap)
    }
}

fn one_batch(q: &Tensor) -> Result<()> {
    match q.dim(0)? {
        1 => Ok(()),
        batch => candle_core::bail!("a batch of {batch}, expected 1"),
    }
}

/// Packed sequences.
pub mod varlen {
    use super::{Result, Tensor, packed_attention};

    packed_attention! {
        /// `candle_nn::attention::flash_attn_varlen_cpu`, differentiable; see
        /// [`flash_attn_varlen_unfused`](super::super::flash_attn_varlen_unfused).
        ///
        /// # Errors
        /// If the shapes or lengths are incompatible. Where no gradient is tracked, also where candle-nn's kernel has a limit.
        flash_attn_varlen_cpu
    }
}
