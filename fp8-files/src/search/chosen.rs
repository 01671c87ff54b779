//! The choices of a search for the files of a model.

use fp8_candle::Fp8Tensor;
use std::collections::BTreeMap;

/// The choices of a search for the files of a model: [`QuantizeOptions::with_chosen`](crate::rewrite::QuantizeOptions::with_chosen).
///
/// The parts belong together: codes of a layer after a shifted norm are those of its shifted weight.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Chosen {
    /// Codes and scales by the path of the layer, in place of plain rounding.
    pub codes: BTreeMap<String, Fp8Tensor>,
    /// By the name of a tensor (`model.layers.0.input_layernorm.weight`): the factors by which its last dimension is multiplied before
    /// anything else is done with it. A norm and the layers that read it have inverse factors: powers of two, unless all of these layers
    /// get codes.
    pub shifts: BTreeMap<String, Vec<f32>>,
    /// For static schemes: the largest absolute input of layers whose inputs are shifted, by path, in place of those that were
    /// calibrated.
    pub input_amaxes: BTreeMap<String, f32>,
}
