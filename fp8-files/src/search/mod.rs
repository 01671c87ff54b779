//! Codes and scales of a weight that keep the error of the layer's outputs small, on the inputs of samples.
//!
//! Rounding each weight to nearest minimizes the error of the weight. The error of the outputs is smaller where the errors of the weights
//! of one output cancel each other on typical inputs: after a weight is rounded, those that follow make up for it. The files have the
//! form of plain rounding.
//!
//! | file | what is in it |
//! |---|---|
//! | `products` | the sums over samples that say how errors of weights show in outputs |
//! | `factor` | the Cholesky factor of such a sum, a block of rows at a time |
//! | `prepared` | these sums and their factors, ready for all layers that read the inputs |
//! | `scales` | the choice of scales |
//! | `rounding` | the choice of codes |
//! | `shifts` | factors that move from inputs into weights |
//! | `chosen` | what all of it has chosen for a model |

mod chosen;
mod factor;
mod prepared;
mod products;
mod rounding;
mod scales;
mod shifts;

pub use chosen::Chosen;
pub use prepared::PreparedInputs;
pub use products::InputProducts;
pub use rounding::{Searched, search_weight};
pub use shifts::{inverse_shift, shifted, shifts_exactly, shifts_to_try};

/// How a search computes.
///
/// ```
/// use fp8_files::search::SearchOptions;
/// assert_eq!(SearchOptions::new().with_damping(0.05).damping, 0.05);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SearchOptions {
    /// What is added to the mean square of each input, as a part of it. It keeps the solution from following the samples too closely, and
    /// makes one possible where they do not determine it. Default 0.3.
    pub damping: f64,
    /// The same where weights make up for errors of their inputs. Most of these errors is noise that differs from sample to sample, and
    /// only those along the largest directions of the inputs should be followed. Default 10; a huge number follows none.
    pub caution: f64,
    /// Whether outliers among a norm's features move into the weights after it where that makes errors smaller. Default yes.
    pub outliers: bool,
    /// Whether the features of a norm are multiplied by factors between 0.7 and 1.4, and divided by them in the weights after it, where they
    /// are rounded less then. This is tried only if all layers that read the norm are searched, and if inputs are cast under powers of two
    /// (MXFP8, ue8m0), which leave each number where it is among the steps of E4M3. Default yes.
    pub retuning: bool,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self {
            damping: 0.3,
            caution: 10.,
            outliers: true,
            retuning: true,
        }
    }
}

impl SearchOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// See [`SearchOptions::damping`].
    #[must_use]
    pub fn with_damping(mut self, damping: f64) -> Self {
        self.damping = damping;
        self
    }

    /// See [`SearchOptions::caution`].
    #[must_use]
    pub fn with_caution(mut self, caution: f64) -> Self {
        self.caution = caution;
        self
    }

    /// See [`SearchOptions::outliers`].
    #[must_use]
    pub fn with_outliers(mut self, outliers: bool) -> Self {
        self.outliers = outliers;
        self
    }

    /// See [`SearchOptions::retuning`].
    #[must_use]
    pub fn with_retuning(mut self, retuning: bool) -> Self {
        self.retuning = retuning;
        self
    }
}
