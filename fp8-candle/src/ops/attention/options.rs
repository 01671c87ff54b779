//! Options of attention, and what they mean for given tensors.

use crate::base::check::{check_float, check_like};
use crate::base::data::attention::{Attention, Dropout};
use crate::base::data::attention_products::AttentionProducts;
use crate::base::error::{Error, Result, dtype_error, shape_error};

use candle_core::{DType, Tensor};

pub(super) const OP: &str = "attention";

/// Options of [`attention`](super::attention).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::ops::{AttentionOptions, attention};
/// let x = Tensor::ones((2, 1, 4, 8), DType::F32, &Device::Cpu)?;
/// let options = AttentionOptions::default().with_window(2).with_key_lengths(vec![4, 0]);
/// let y = attention(&x, &x, &x, options)?;
/// // The second entry of the batch has no keys.
/// assert_eq!(y.mean((1, 2, 3))?.to_vec1::<f32>()?, [1.0, 0.0]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Whether to hide the keys after each query: query i sees keys up to `i + tk - tq`, so the last query sees every key,
    /// and `tk > tq` means that `tk - tq` cached keys come before the queries.
    pub causal: bool,
    /// The factor on the dot products before the softmax; `1 / sqrt(d)` by default.
    pub softmax_scale: Option<f64>,
    /// The most keys that a query sees, up to and with its own position: a sliding window, which is causal as well.
    pub window: Option<usize>,
    /// How many keys each batch entry has: those behind are padding, which no query sees. Their number is that of the batch.
    /// A query that sees no key at all has a result of zeros and no gradient.
    pub key_lengths: Option<Vec<usize>>,
    /// Which probabilities become 0. Attention over a cache refuses dropout.
    pub dropout: Option<AttentionDropout>,
    /// The dtype to which q, k, v, the probabilities and, in the backward pass, the gradients are rounded before each product;
    /// that of the tensors by default. bf16 gives f32 tensors the speed of bf16, as automatic mixed precision does; sums and
    /// softmax stay in f32.
    pub operands: Option<DType>,
    /// The products whose operands are cast to FP8 instead; none by default.
    pub products: AttentionProducts,
}

/// Dropout of attention's probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionDropout {
    /// The probability of becoming 0, in `[0, 1)`; what stays is divided by one minus it.
    pub probability: f64,
    /// What is dropped is a function of this seed, the batch entry, the head, the query and the key: use another one for every
    /// layer and step.
    pub seed: u64,
}

impl AttentionDropout {
    /// Dropout with this probability and seed.
    pub fn new(probability: f64, seed: u64) -> Self {
        Self { probability, seed }
    }
}

impl AttentionOptions {
    /// The same options with or without a causal mask.
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same options with another factor before the softmax; `None` for `1 / sqrt(d)`.
    pub fn with_softmax_scale(self, softmax_scale: impl Into<Option<f64>>) -> Self {
        Self {
            softmax_scale: softmax_scale.into(),
            ..self
        }
    }

    /// The same options with another sliding window; `None` for all keys.
    pub fn with_window(self, window: impl Into<Option<usize>>) -> Self {
        Self {
            window: window.into(),
            ..self
        }
    }

    /// The same options with other lengths of the batch entries; `None` for no padding.
    pub fn with_key_lengths(self, key_lengths: impl Into<Option<Vec<usize>>>) -> Self {
        Self {
            key_lengths: key_lengths.into(),
            ..self
        }
    }

    /// The same options with other dropout.
    pub fn with_dropout(self, dropout: impl Into<Option<AttentionDropout>>) -> Self {
        Self {
            dropout: dropout.into(),
            ..self
        }
    }

    /// The same options with another dtype of the operands; `None` for that of the tensors.
    pub fn with_operands(self, operands: impl Into<Option<DType>>) -> Self {
        Self {
            operands: operands.into(),
            ..self
        }
    }

    /// The same options with other products in FP8.
    pub fn with_products(self, products: AttentionProducts) -> Self {
        Self { products, ..self }
    }
}

impl Attention {
    /// One call with these tensors.
    pub(crate) fn new(
        [q, k, v]: [&Tensor; 3],
        options: &AttentionOptions,
        tokens_first: bool,
    ) -> Result<Self> {
        check_float(OP, "q", q)?;
        check_like(OP, "k", k, q)?;
        check_like(OP, "v", v, q)?;
        // Batch, heads, tokens, features.
        let sizes = |what: &'static str, x: &Tensor| match *x.dims() {
            [b, t, h, d] if tokens_first => Ok([b, h, t, d]),
            [b, h, t, d] => Ok([b, h, t, d]),
            _ => Err(shape_error(OP, what, "four dimensions", x.dims())),
        };
        let [batch, heads, queries, head_dim] = sizes("q", q)?;
        let [k_batch, kv_heads, keys, k_dim] = sizes("k", k)?;
        if (k_batch, k_dim) != (batch, head_dim) || kv_heads == 0 || heads % kv_heads != 0 {
            let expected = format!(
                "batch {batch}, heads that divide {heads}, {head_dim} features, as q {:?} has",
                q.dims()
            );
            return Err(shape_error(OP, "k", expected, k.dims()));
        }
        if v.dims() != k.dims() {
            return Err(shape_error(
                OP,
                "v",
                format!("{:?}, as k", k.dims()),
                v.dims(),
            ));
        }
        let causal = options.causal || options.window.is_some();
        if keys == 0 || causal && keys < queries {
            let least = if causal { queries.max(1) } else { 1 };
            return Err(shape_error(
                OP,
                "k",
                format!("at least {least} keys"),
                k.dims(),
            ));
        }
        let sizes = [batch, heads, kv_heads, queries, keys, head_dim];
        Self::of(sizes, q.dtype(), options, tokens_first)
    }

    /// One call of these sizes (batch, heads, heads of keys, queries, keys, features of a head) for tensors of `dtype`.
    pub(crate) fn of(
        [batch, heads, kv_heads, queries, keys, head_dim]: [usize; 6],
        dtype: DType,
        options: &AttentionOptions,
        tokens_first: bool,
    ) -> Result<Self> {
        if let Some(lengths) = &options.key_lengths
            && (lengths.len() != batch || lengths.iter().any(|&length| length > keys))
        {
            return Err(shape_error(
                OP,
                "key_lengths",
                format!("{batch} lengths up to {keys}, one per batch entry"),
                lengths.clone(),
            ));
        }
        let dropout = match options.dropout {
            Some(AttentionDropout { probability, .. }) if !(0.0..1.0).contains(&probability) => {
                return Err(Error::Probability {
                    op: OP,
                    got: probability,
                });
            }
            Some(AttentionDropout { probability, seed }) if probability > 0.0 => {
                Some(Dropout::new(probability, seed))
            }
            _ => None,
        };
        match options.operands {
            None | Some(DType::BF16) => (),
            Some(operands) if operands == dtype => (),
            Some(DType::F32) if dtype != DType::F64 => (),
            Some(got) => {
                return Err(dtype_error(
                    OP,
                    "the operands of products",
                    "bf16, f32 unless the tensors are f64, or the dtype of the tensors",
                    got,
                ));
            }
        }
        Ok(Self {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            causal: options.causal || options.window.is_some(),
            // As wide as the keys, it hides nothing that `causal` does not.
            window: options.window.filter(|&window| window < keys),
            key_lengths: options.key_lengths.as_deref().map(Into::into),
            softmax_scale: options
                .softmax_scale
                .unwrap_or(1.0 / (head_dim as f64).sqrt()),
            dropout,
            operands: options.operands,
            products: options.products,
            tokens_first,
            normalizes: false,
        })
    }
}
