//! Attention.

use super::arith::Like;
use super::check::check_same_device;
use super::data_norm::{Norm, norm_of};
use super::error::Result;
use super::kernels::convert;
use super::parts::sized;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops::elements::wide_dtype;
use fp8_candle::ops::{AttentionOptions, detached};
use fp8_core::floor_to_power_of_two;
use fp8_core::scaled::{Factored, Scale, mul_rule};

impl Scaled {
    /// Attention of every query over the keys of its head, [`ops::attention`](fp8_candle::ops::attention) of the values: `q`
    /// `[b, h, tq, d]`, `k` and `v` `[b, h_kv, tk, d]`. Scale: that of `v`, since the result averages rows of `v`; the dtype
    /// is that of `q`. Computed in f32. The scale of each gradient follows from its data, as after [`Scaled::dynamic_rescale_l2`].
    ///
    /// # Errors
    /// If the shapes or devices do not fit.
    pub fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
        attend([q, k, v], options, false)
    }

    /// [`Scaled::attention`] with tokens before heads: `q` `[b, tq, h, d]`, `k` and `v` `[b, tk, h_kv, d]`.
    ///
    /// # Errors
    /// As [`Scaled::attention`].
    pub fn attention_tokens_first(
        q: &Self,
        k: &Self,
        v: &Self,
        options: AttentionOptions,
    ) -> Result<Self> {
        attend([q, k, v], options, true)
    }
}

fn attend(parents: [&Scaled; 3], options: AttentionOptions, tokens_first: bool) -> Result<Scaled> {
    let [q, k, v] = parents;
    let op = "attention";
    check_same_device(op, q, k)?;
    check_same_device(op, q, v)?;
    let ((_, q_size), (_, k_size)) = (sized(q)?, sized(k)?);
    let root = (q.dims().last().copied().unwrap_or(1) as f64).sqrt();
    let softmax_scale = options.softmax_scale.unwrap_or(1.0 / root) * q_size * k_size;
    // Keep it finite in f32, so that logits of 0 stay 0.
    let largest = f64::from(f32::MAX);
    let options = options.with_softmax_scale(softmax_scale.clamp(-largest, largest));
    let wide = wide_dtype(q.compute_dtype());
    let data = |x: &Scaled| -> Result<Tensor> { convert(op, &sized(x)?.0, 1.0, wide) };
    let qkv = [data(q)?, data(k)?, data(v)?];
    let (y, gradients) = detached::attention(qkv.each_ref(), &options, tokens_first, wide)?;
    let y = convert(op, &y, 1.0, q.compute_dtype())?;
    let value = Scaled::new(y, v.scale()).zeroed()?;
    let likes = parents.map(Like::of);
    let [q_scale, k_scale, v_scale] = parents.map(Scaled::scale);
    Ok(Scaled::record(value, op, parents, move |g, wanted| {
        let found = gradients(&g.float(wide)?, wanted)?;
        // The gradient with respect to the data of q: softmax_scale includes the scales of q and k. Dividing by them before the
        // rounding leaves the scale of the product of cotangent, values and keys.
        let product = |a, b| -> Factored {
            let first = mul_rule(g.scale(), a);
            let mut both = mul_rule(first.scale, b);
            both.data_factor *= first.data_factor;
            both
        };
        let out = 1.0 / q_size / k_size;
        let rules = [
            (product(v_scale, k_scale), out),
            (product(v_scale, q_scale), out),
            (product(Scale::ONE, Scale::ONE), 1.0),
        ];
        let mut grads = [None, None, None];
        for (i, ((rule, factor), grad)) in rules.into_iter().zip(&found).enumerate() {
            let Some(grad) = grad else { continue };
            // These are products of three tensors, summed over a softmax that may be flat or peaked: no rule of the scales alone
            // keeps them in the range of f16, so the norm of the data decides.
            let factor = f64::from(rule.data_factor) * factor;
            let size = size_of(grad, factor)?;
            let rule = mul_rule(rule.scale, size);
            let factor = factor / f64::from(size.to_f32()) * f64::from(rule.data_factor);
            let grad = convert(op, grad, factor as f32, likes[i].dtype())?;
            grads[i] = Some(Scaled::new(grad, rule.scale).zeroed()?);
        }
        Ok(grads)
    }))
}

/// The power of two below the root mean square of `factor * data`; 1 if that is not a normal number.
fn size_of(data: &Tensor, factor: f64) -> Result<Scale> {
    let size = f64::from(norm_of(data, Norm::L2)?) * factor.abs();
    let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
    Ok(match range.contains(&size) {
        true => Scale::lenient(floor_to_power_of_two(size as f32))?,
        false => Scale::ONE,
    })
}
