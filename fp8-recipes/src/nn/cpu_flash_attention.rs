//! The old name of [`attention::flash_attn`](super::attention::flash_attn).

use super::attention::{AttnMask, flash_attn};
use candle_core::{Result, Tensor, WithDType};

/// [`flash_attn`] with a mask that is added to the logits, or none.
///
/// # Errors
/// As [`flash_attn`].
#[deprecated(note = "use `nn::attention::{flash_attn, AttnMask}`")]
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
    T: WithDType + num_traits::Float + 'static,
{
    let mask = mask.map_or(AttnMask::None, |mask| AttnMask::Mask(mask.clone()));
    flash_attn::<T>(q, k, v, softmax_scale, mask, max_bias, softcap)
}
