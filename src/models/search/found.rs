//! The result of a search.

use fp8_files::search::Chosen;

/// The result of a search.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct FoundCodes {
    /// Codes and scales of layers, and the factors by which norms and their readers are multiplied:
    /// [`QuantizeOptions::with_chosen`](crate::rewrite::QuantizeOptions::with_chosen).
    pub chosen: Chosen,
    /// How far the outputs of each layer are from those in high precision.
    pub errors: Vec<OutputError>,
    /// Paths of the norms whose outliers move into the layers that read them.
    pub shifted: Vec<String>,
    /// Paths of the norms whose features were rescaled for smaller rounding errors ([`SearchOptions::retuning`](fp8_files::search::SearchOptions::retuning)).
    pub retuned: Vec<String>,
    /// Paths of the layers that will be rounded plainly: those outside the blocks (the head; the pooler and classifier of a BERT), and
    /// experts that no token has reached.
    pub plain: Vec<String>,
}

/// The error of a layer's outputs on the samples, as a share of the outputs, by norm. It counts only what depends on the choice of codes,
/// and tokens as the search does.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct OutputError {
    /// Path of the layer.
    pub path: String,
    /// With the codes that were found.
    pub found: f64,
    /// With plain rounding; after retuning alone, plain rounding of the weights divided by the factors.
    pub plain: f64,
}
