//! Dropout whose mask depends on a seed and the place of an element alone.

use crate::base::error::{Error, Result};
use crate::base::profile::{Kind, enter};
use crate::device::cpu::elements::par_blocks;
use candle_core::Tensor;
use fp8_core::philox4x32_10;

fn check(p: f64) -> Result<()> {
    match (0.0..1.0).contains(&p) {
        true => Ok(()),
        false => Err(Error::Probability {
            op: "dropout",
            got: p,
        }),
    }
}

/// The mask of [`dropout`] for `len` elements: 1 for those that stay.
///
/// # Errors
/// If `p` is below 0, or 1 or more.
pub fn mask(len: usize, p: f64, seed: u64) -> Result<Vec<u8>> {
    check(p)?;
    let least = (p * 2f64.powi(32)) as u32;
    let mut mask = vec![0; len];
    // Blocks of whole draws: four elements each.
    par_blocks(&mut mask, 1 << 14, |start, mask| {
        for (i, mask) in mask.chunks_mut(4).enumerate() {
            let draw = (start / 4 + i) as u64;
            let words = philox4x32_10(
                [draw as u32, (draw >> 32) as u32, 0, 0],
                [seed as u32, (seed >> 32) as u32],
            );
            for (mask, word) in mask.iter_mut().zip(words) {
                *mask = u8::from(word >= least);
            }
        }
    });
    Ok(mask)
}

/// Sets a share `p` of the elements to zero and multiplies the others by `1 / (1 - p)`. The choice depends on `seed` and the
/// place of an element alone, on every device.
///
/// # Errors
/// If `p` is below 0, or 1 or more.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
/// let y = fp8_candle::ops::dropout(&x, 0.5, 7)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|&y| y == 0. || y == 2.));
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn dropout(x: &Tensor, p: f64, seed: u64) -> Result<Tensor> {
    let _scope = enter(Kind::Activation);
    check(p)?;
    if p == 0. {
        return Ok(x.clone());
    }
    let mask = Tensor::from_vec(mask(x.elem_count(), p, seed)?, x.dims(), x.device())?;
    let x = x.contiguous()?;
    let kept = x.affine(1. / (1. - p), 0.)?;
    // Not a product: dropped elements may be Inf or NaN.
    Ok(mask.where_cond(&kept, &kept.zeros_like()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_the_same_in_any_length() -> Result<()> {
        let long = mask((1 << 15) + 3, 0.4, 9)?;
        assert_eq!(mask(1001, 0.4, 9)?, long[..1001]);
        assert_ne!(mask(1001, 0.4, 10)?, long[..1001]);
        Ok(())
    }
}
