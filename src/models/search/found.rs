//! What a search has found.

use fp8_files::search::Chosen;

/// What a search has found.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct FoundCodes {
    /// Codes and scales of layers, and the powers of two by which norms and their readers are multiplied:
    /// [`QuantizeOptions::with_chosen`](crate::rewrite::QuantizeOptions::with_chosen).
    pub chosen: Chosen,
    /// How far the outputs of each layer are from what they are meant to be.
    pub errors: Vec<OutputError>,
    /// Paths of the norms whose outliers move into the layers that read them.
    pub shifted: Vec<String>,
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
