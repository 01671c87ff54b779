//! The other inputs of a call of a transformer module.

use candle_core::Tensor;
use fp8_core::setters;
use rapidhash::v3::rapidhash_v3;

/// The other inputs of a call: positions, padding, and the seed of dropout.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{Device, Tensor};
/// use fp8::nn::LayerInputs;
/// let angles = Tensor::zeros((4, 2), candle_core::DType::F32, &Device::Cpu)?;
/// let (cos, sin) = (angles.cos()?, angles.sin()?);
/// let inputs = LayerInputs::default().with_rope(&cos, &sin).with_key_lengths(vec![4, 2]).with_dropout_seed(7);
/// # let _ = inputs;
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LayerInputs<'a> {
    /// cos and sin of the tokens' positions, `[tokens, head_dim / 2]`; with None, queries and keys are not rotated.
    pub rope: Option<(&'a Tensor, &'a Tensor)>,
    /// How many tokens each batch entry has before its padding; None: all.
    pub key_lengths: Option<Vec<usize>>,
    /// Turns dropout on, as training does: this seed, the layer's path and the place decide which elements are dropped. None drops
    /// nothing, for evaluation. Every step needs a new seed. Layers without a path (made of tensors, not by a `VarBuilder`) all
    /// drop the same elements.
    pub dropout_seed: Option<u64>,
}

impl<'a> LayerInputs<'a> {
    /// A copy of the inputs with rotary positions.
    pub fn with_rope(self, cos: &'a Tensor, sin: &'a Tensor) -> Self {
        Self {
            rope: Some((cos, sin)),
            ..self
        }
    }

    /// The seed for one of several places in a layer.
    pub(super) fn seed(&self, path: Option<&str>, place: u64) -> Option<u64> {
        let path = path.unwrap_or_default();
        self.dropout_seed.map(|seed| seed_at(seed, path, place))
    }
}

/// A seed of its own for one of several places in the layer at `path`.
pub(in crate::nn) fn seed_at(seed: u64, path: &str, place: u64) -> u64 {
    // The same on every machine.
    let hash = rapidhash_v3(path.as_bytes());
    seed ^ hash.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

setters! { LayerInputs<'_>:
    with_key_lengths(key_lengths: into Option<Vec<usize>>);
    with_dropout_seed(dropout_seed: into Option<u64>);
}
