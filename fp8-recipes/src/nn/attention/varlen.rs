//! Attention over packed sequences of different lengths.

use super::scores::{Scores, bias};
use candle_core::{Result, Tensor};
use fp8_candle::ops;

/// The options of attention over packed sequences.
pub(super) struct Packed<'a> {
    pub(super) slopes: Option<&'a Tensor>,
    pub(super) lengths: [&'a Tensor; 2],
    pub(super) scale: f32,
    pub(super) causal: bool,
    /// How many keys to its left and to its right a query sees.
    pub(super) window: (Option<usize>, Option<usize>),
}

impl Packed<'_> {
    /// `q` `[total_q, h, d]`, `k` and `v` `[total_k, h_kv, d]` to `[total_q, h, d]`.
    pub(super) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let heads = q.dim(1)?;
        let [q_lengths, k_lengths] = self.lengths;
        let read = |lengths: &Tensor| -> Result<Vec<usize>> {
            let lengths = lengths.to_vec1::<u32>()?;
            Ok(lengths.into_iter().map(|len| len as usize).collect())
        };
        let (q_lengths, k_lengths) = (read(q_lengths)?, read(k_lengths)?);
        let totals = (q_lengths.iter().sum(), k_lengths.iter().sum());
        if totals != (q.dim(0)?, k.dim(0)?) || q_lengths.len() != k_lengths.len() {
            candle_core::bail!(
                "sequences of {q_lengths:?} queries and {k_lengths:?} keys do not fit {:?} and {:?}",
                q.dims(),
                k.dims()
            );
        }
        let slopes = self.slopes.map(Tensor::to_vec1::<f32>).transpose()?;
        if let Some(slopes) = &slopes
            && slopes.len() != heads
        {
            candle_core::bail!("{} ALiBi slopes for {heads} heads", slopes.len());
        }
        let split = |x: &Tensor, lengths| ops::split(x, 0, lengths);
        let (qs, ks) = (split(q, &q_lengths)?, split(k, &k_lengths)?);
        let mut outputs = vec![];
        for ((q, k), v) in qs.iter().zip(&ks).zip(&split(v, &k_lengths)?) {
            let (tq, tk) = (q.dim(0)?, k.dim(0)?);
            if self.causal && tk < tq {
                candle_core::bail!("causal attention of {tq} queries over {tk} keys");
            }
            let by_head = |x: &Tensor| x.transpose(0, 1)?.unsqueeze(0);
            let (q, k, v) = (by_head(q)?, by_head(k)?, by_head(v)?);
            if tq == 0 {
                continue;
            }
            if tk == 0 {
                outputs.push(q.zeros_like()?.squeeze(0)?.transpose(0, 1)?);
                continue;
            }
            let scores = Scores {
                scale: self.scale.into(),
                softcap: None,
                bias: vec![self.bias((heads, tq, tk), slopes.as_deref(), &q)?],
            };
            let y = scores.attend(&q, &k, &v)?.to_dtype(q.dtype())?;
            outputs.push(y.squeeze(0)?.transpose(0, 1)?);
        }
        match outputs.is_empty() {
            true => q.zeros_like(),
            false => Tensor::cat(&outputs, 0),
        }
    }

    fn bias(
        &self,
        (heads, tq, tk): (usize, usize, usize),
        slopes: Option<&[f32]>,
        like: &Tensor,
    ) -> Result<Tensor> {
        let (left, right) = match self.window {
            (None, None) => (i64::MAX, i64::MAX),
            (Some(left), right) => (left as i64, right.unwrap_or(0) as i64),
            (None, Some(_)) => candle_core::bail!("a window to the right without one to the left"),
        };
        let right = if self.causal { 0 } else { right };
        let heads = slopes.map_or(1, |_| heads);
        let first = tk as i64 - tq as i64;
        bias((heads, tq, tk), like.device(), |head, i, j| {
            let behind = i + first - j;
            if behind > left || -behind > right {
                return f32::NEG_INFINITY;
            }
            slopes.map_or(0., |slopes| -slopes[head] * behind.abs() as f32)
        })
    }
}

/// A function of candle-nn for packed sequences, differentiable in `q`, `k` and `v`.
macro_rules! packed_attention {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub fn $name(
            q: &Tensor,
            k: &Tensor,
            v: &Tensor,
            alibi_slopes: Option<&Tensor>,
            seqlens_q: &Tensor,
            seqlens_k: &Tensor,
            max_seqlen_q: usize,
            max_seqlen_k: usize,
            softmax_scale: f32,
            causal: bool,
            window_size_left: Option<usize>,
            window_size_right: Option<usize>,
        ) -> Result<Tensor> {
            if let Some(slopes) = alibi_slopes {
                let op = concat!(stringify!($name), ", alibi_slopes");
                $crate::nn::no_gradient_through(op, &[slopes])?;
            }
            // candle-nn adds positions to them.
            let wide = |keys: usize| keys.min(i32::MAX as usize);
            let window_size_left = window_size_left.map(wide);
            let window_size_right = window_size_right.map(wide);
            if !$crate::nn::attention::tracked(&[q, k, v]) {
                return candle_nn::attention::$name(
                    q,
                    k,
                    v,
                    alibi_slopes,
                    seqlens_q,
                    seqlens_k,
                    max_seqlen_q,
                    max_seqlen_k,
                    softmax_scale,
                    causal,
                    window_size_left,
                    window_size_right,
                );
            }
            let packed = $crate::nn::attention::varlen::Packed {
                slopes: alibi_slopes,
                lengths: [seqlens_q, seqlens_k],
                scale: softmax_scale,
                causal,
                window: (window_size_left, window_size_right),
            };
            packed.attend(q, k, v)
        }
    };
}
pub(super) use packed_attention;

packed_attention! {
    /// Attention over packed sequences: `candle_nn::attention::flash_attn_varlen_unfused`, differentiable in `q`, `k` and `v`.
    ///
    /// Sequence `n` has `seqlens_q[n]` queries and `seqlens_k[n]` keys. With `causal`, or a window, query `i` stands at key
    /// `i + seqlens_k[n] - seqlens_q[n]`. `alibi_slopes` `[h]` multiply the distance to a key, which is subtracted.
    ///
    /// # Shapes
    /// `q` `[total_q, h, d]`, `k` and `v` `[total_k, h_kv, d]` with `h` a multiple of `h_kv`, `seqlens_q` and `seqlens_k` u32
    /// `[n]`. Result `[total_q, h, d]`.
    ///
    /// # Errors
    /// If the shapes or lengths are incompatible, or there is a window to the right without one to the left.
    flash_attn_varlen_unfused
}
