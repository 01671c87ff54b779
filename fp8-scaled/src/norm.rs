//! LayerNorm and RMSNorm.

use super::error::Result;
use super::kernels::times;
use super::options::Options;
use super::parts::{factored, sized};
use super::value::Scaled;
use fp8_candle::ops::detached;
use fp8_core::scaled::{Aligned, Scale, add_rule, div_rule, mul_rule, sum_rule};

impl Scaled {
    /// Layer normalization over the last dimension: [`ops::layer_norm`](fp8_candle::ops::layer_norm) of the value. Scale: that of the
    /// gain, with a bias by the rule of [`Scaled::add`]; the dtype is that of the input.
    ///
    /// # Errors
    /// If `gain` or `bias` are not `[last dim]`.
    pub fn layer_norm(&self, gain: &Self, bias: Option<&Self>, eps: f64) -> Result<Self> {
        self.norm("layer_norm", true, gain, bias, eps)
    }

    /// Root mean square normalization over the last dimension: [`ops::rms_norm`](fp8_candle::ops::rms_norm) of the value. Scale: that
    /// of the gain; the dtype is that of the input.
    ///
    /// # Errors
    /// If `gain` is not `[last dim]`.
    pub fn rms_norm(&self, gain: &Self, eps: f64) -> Result<Self> {
        self.norm("rms_norm", false, gain, None, eps)
    }

    fn norm(
        &self,
        op: &'static str,
        center: bool,
        gain: &Self,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let options = Options::current();
        let rule = match bias {
            Some(bias) => add_rule(gain.scale(), bias.scale(), options.round()),
            None => Aligned {
                scale: gain.scale(),
                data_factors: [1.0, 0.0],
            },
        };
        let (mut x, mut size) = sized(self)?;
        // The statistics are those of the data, in f32, but eps belongs to the value. If the values are far below the root of eps, shrink
        // the data so that eps stays in range.
        while eps / size / size > 2f64.powi(100) && size < 1.0 {
            x = times(op, &x, 2f32.powi(-20))?;
            size *= 2f64.powi(20);
        }
        // With eps, rows of zeros must not be divided by 0 however large the scale is. Without eps they are, unless the scale is 0.
        let floor = if eps > 0.0 || self.scale().is_zero() {
            f64::from(f32::MIN_POSITIVE)
        } else {
            0.0
        };
        let eps = (eps / size / size).clamp(floor, f64::from(f32::MAX));
        let dtype = x.dtype();
        let [gain_factor, bias_factor] = rule.data_factors;
        let weight = gain.float(dtype)?;
        let shift = match bias {
            Some(bias) => Some(times(op, &bias.float(dtype)?, bias_factor)?),
            None => None,
        };
        let factored_weight = times(op, &weight, gain_factor)?;
        let data = detached::norm(center, &x, &factored_weight, shift.as_ref(), eps)?;
        let value = Self::new(data, rule.scale).zeroed()?;
        let x_scale = Scale::lenient(size as f32)?;
        let gain_scale = gain.scale();
        let gain_like = super::arith::Like::of(gain);
        let bias_like = bias.map(super::arith::Like::of);
        let parents: Vec<&Self> = [Some(self), Some(gain), bias]
            .into_iter()
            .flatten()
            .collect();
        Ok(Self::record_many(value, op, &parents, move |g, _| {
            let rows = g.elem_count().checked_div(weight.elem_count()).unwrap_or(0);
            let sums = sum_rule(g.scale(), rows, Options::current().round());
            let g_data = g.float(dtype)?;
            let [dx, dw, db] = detached::norm_gradients(
                center,
                &x,
                &weight,
                &g_data,
                eps,
                sums.data_factor.into(),
            )?;
            // The kernel gives the gradient of the data: that of the value times the scale of x.
            let through = mul_rule(g.scale(), gain_scale);
            let mut over = div_rule(through.scale, x_scale)?;
            over.data_factor *= through.data_factor;
            let dx = factored(op, &dx, &over)?;
            let dw = gain_like.cotangent(&Self::new(dw, sums.scale).zeroed()?)?;
            let mut grads = vec![Some(dx), Some(dw)];
            if let Some(like) = &bias_like {
                grads.push(Some(like.cotangent(&Self::new(db, sums.scale).zeroed()?)?));
            }
            Ok(grads)
        }))
    }
}
