//! What a search has found.

use fp8_candle::Fp8Tensor;
use std::collections::BTreeMap;

/// What a search has found.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct FoundCodes {
    /// Codes and scales by the path of the layer: [`QuantizeOptions::with_codes`](crate::rewrite::QuantizeOptions::with_codes).
    pub codes: BTreeMap<String, Fp8Tensor>,
    /// How far the outputs of each layer are from what they are meant to be.
    pub errors: Vec<OutputError>,
    /// Paths of the layers that will be rounded plainly: those outside the blocks (the head; the pooler and classifier of a BERT), and
    /// experts that no token has reached.
    pub plain: Vec<String>,
}

/// The error of a layer's outputs on the samples, over the outputs, by norm. Only what depends on the choice of codes counts.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct OutputError {
    /// Path of the layer.
    pub path: String,
    /// With the codes that were found.
    pub found: f64,
    /// With plain rounding.
    pub plain: f64,
}
