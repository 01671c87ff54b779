//! Dropout.

use super::error::Result;
use super::kernels::{map, map_fn};
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops::detached::dropout_mask;
use fp8_core::scaled::{Factored, constant_rule, mul_rule};

impl Scaled {
    /// Replaces elements by zeros with the probability `p` and divides the others by `1 - p`. Which elements stay depends only on `seed`
    /// and their positions. Scale: that of the product with the constant `1 / (1 - p)`.
    ///
    /// # Errors
    /// If `p` is not in `0..1`.
    pub fn dropout(&self, p: f64, seed: u64) -> Result<Self> {
        let op = "dropout";
        let x = self.data()?;
        let mask = dropout_mask(x.elem_count(), p, seed)?;
        if p == 0.0 {
            return Ok(self.clone());
        }
        let mask = Tensor::from_vec(mask, x.dims(), x.device())?.to_dtype(x.dtype())?;
        let (power, mantissa) = constant_rule(1.0 / (1.0 - p));
        let dropped = move |x: &Self, mask: &Tensor| -> Result<Self> {
            let Factored { scale, data_factor } = mul_rule(x.scale(), power);
            let k = f64::from(mantissa * data_factor);
            Self::new(map(op, Keep { k }, [&x.float(mask.dtype())?, mask])?, scale).zeroed()
        };
        let value = dropped(self, &mask)?;
        Ok(self.recorded(value, op, move |g| dropped(g, &mask)))
    }
}

// `k * x` where the mask is not 0. Not a product with the mask: a dropped element may be Inf or NaN.
map_fn!(
    Keep { k },
    |x, mask| if mask > R::ZERO { x * k } else { R::ZERO },
    |x, mask| {
        let kept = (x * k)?;
        mask.gt(0.0)?.where_cond(&kept, &kept.zeros_like()?)?
    }
);

#[cfg(test)]
mod tests {
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn the_kernel_equals_its_definition() {
        check(Keep { k: 1.5 }, false);
    }
}
