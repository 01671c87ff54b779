//! The keys and values of earlier tokens.

use super::room::Room;
use crate::array::Array;
use crate::error::Result;
use candle_core::Tensor;
use fp8_candle::ops::AttentionOptions;

/// Keys and values of the tokens seen so far, `[batch, kv_heads, tokens, head_dim]`.
///
/// Causal attention of plain tensors outside any graph, without dropout, writes them into memory that grows by doubling, and that a sliding
/// window bounds; copies of a cache share it until they differ. On the CPU it reads them in place, and its rows are to the bit those of one
/// pass over the whole sequence, with a sliding window too, where no scale depends on other tokens. Tensors in a graph and scaled ones are
/// concatenated.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// # let attention = multihead_attention(&config, vb)?;
/// # let inputs = LayerInputs::default();
/// let mut cache = KeyValues::default();
/// attention.forward_cached(&x.narrow(1, 0, 4)?, &inputs, &mut cache)?;
/// let y: Tensor = attention.forward_cached(&x.narrow(1, 4, 1)?, &inputs, &mut cache)?;
/// assert_eq!(y.dims(), [2, 1, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeyValues<A = Tensor>(Option<Held<A>>);

/// The tokens of a cache.
#[derive(Debug, Clone)]
enum Held<A> {
    /// In arrays of their own.
    Arrays { k: A, v: A },
    /// In memory with room for more.
    Room(Room),
}

impl<A> Default for KeyValues<A> {
    fn default() -> Self {
        Self(None)
    }
}

impl<A: Array> KeyValues<A> {
    /// Number of tokens whose keys are held, of which a sliding window leaves the last ones.
    pub(super) fn len(&self, window: Option<usize>) -> usize {
        match &self.0 {
            None => 0,
            Some(Held::Arrays { k, .. }) => k.dims().get(2).copied().unwrap_or(0),
            Some(Held::Room(room)) => room.held(window),
        }
    }

    /// Runs `compute`, which appends tokens; after a failure the cache is as before.
    pub(super) fn extended<T>(
        &mut self,
        compute: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let before = self.clone();
        let done = compute(self);
        if done.is_err() {
            *self = before;
        }
        done
    }

    /// Attention of `q` over the tokens held and those of `k` and `v`, which are appended.
    pub(super) fn attention(
        &mut self,
        q: &A,
        [k, v]: [A; 2],
        options: AttentionOptions,
    ) -> Result<A> {
        let causal = options.causal || options.window.is_some();
        let fits =
            causal && options.dropout.is_none() && !matches!(self.0, Some(Held::Arrays { .. }));
        if let (true, [Some(q), Some(k), Some(v)]) = (fits, [q, &k, &v].map(outside_graphs)) {
            let room = match self.0.take() {
                Some(Held::Room(room)) => room,
                _ => Room::of(k, v)?,
            };
            let (room, y) = room.attention(q, [k, v], options)?;
            self.0 = Some(Held::Room(room));
            return of_plain(y);
        }
        let [k, v] = self.append([k, v], options.window)?;
        A::attention(q, &k, &v, options)
    }

    /// Appends keys and values of new tokens to the arrays; everything that a new token may attend to.
    fn append(&mut self, [mut k, mut v]: [A; 2], window: Option<usize>) -> Result<[A; 2]> {
        let held = match self.0.take() {
            Some(Held::Arrays { k, v }) => Some([k, v]),
            Some(Held::Room(room)) => {
                let [k, v] = room.tokens(window)?;
                Some([of_plain(k)?, of_plain(v)?])
            }
            None => None,
        };
        if let Some([old_k, old_v]) = held {
            (k, v) = (A::cat(&[&old_k, &k], 2)?, A::cat(&[&old_v, &v], 2)?);
        }
        let seen = k.dims().get(2).copied().unwrap_or(0);
        let last = |x: &A| match window.filter(|window| seen > *window) {
            Some(window) => x.narrow(2, seen - window, window)?.contiguous(),
            None => Ok(x.clone()),
        };
        self.0 = Some(Held::Arrays {
            k: last(&k)?,
            v: last(&v)?,
        });
        Ok([k.contiguous()?, v.contiguous()?])
    }
}

/// The plain tensor of `x`, if no graph holds it.
fn outside_graphs<A: Array>(x: &A) -> Option<&Tensor> {
    x.plain().filter(|x| !x.track_op())
}

/// The array of a plain tensor, of the kind that this was made of.
fn of_plain<A: Array>(x: Tensor) -> Result<A> {
    let scaled = || Err(candle_core::Error::Msg("a plain tensor as a scaled one".into()).into());
    A::create(|| Ok(x), scaled)
}
