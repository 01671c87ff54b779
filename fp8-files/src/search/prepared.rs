//! The inputs of layers as a search needs them: computed once for all layers that read them.

use super::SearchOptions;
use super::factor::Factor;
use super::products::InputProducts;
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};

/// How often the damping is multiplied by ten, if the products with it have no factor.
const RETRIES: usize = 3;

/// Inputs, prepared for searches of the weights that they are multiplied with: [`search_weight`](super::search_weight).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_core::Granularity;
/// use fp8_files::search::{InputProducts, PreparedInputs, SearchOptions, search_weight};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut products = InputProducts::new(32)?;
/// let x = Tensor::randn(0f32, 1., (64, 32), &Device::Cpu)?;
/// products.add(&x, &x)?;
/// let inputs = PreparedInputs::new(&products, &SearchOptions::new(), "k_proj")?;
/// for path in ["k_proj", "v_proj"] {
///     let weight = Tensor::randn(0f32, 1., (8, 32), &Device::Cpu)?;
///     search_weight(&weight, Granularity::Rowwise, &inputs, path)?;
/// }
/// # Ok(()) }
/// ```
pub struct PreparedInputs {
    /// Position to feature: features are in ascending order of their squares, so that the largest is rounded first.
    pub(super) order: Vec<u32>,
    /// Lᵀ of the damped products in f32, which says what errors of weights do to outputs.
    pub(super) transposed: Tensor,
    pub(super) diagonal: Vec<f64>,
    /// The factor of the products damped by `caution`, and the products with the errors of inputs; None without errors.
    correction: Option<(Factor, Tensor)>,
}

impl std::fmt::Debug for PreparedInputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let features = self.features();
        write!(f, "PreparedInputs {{ features: {features} }}")
    }
}

impl PreparedInputs {
    /// Factors the products of inputs. `path`, that of a layer which reads them, is for messages.
    ///
    /// # Errors
    /// [`Error::Search`] if there was no token, or the products are not finite; and if an operation fails.
    pub fn new(products: &InputProducts, options: &SearchOptions, path: &str) -> Result<Self> {
        let failed = |reason: String| Error::Search {
            path: path.to_string(),
            reason,
        };
        if products.tokens() == 0 {
            return Err(failed("no token of the samples has reached it".into()));
        }
        let squares = products.squares()?;
        if let Some(i) = squares.iter().position(|square| !square.is_finite()) {
            return Err(failed(format!(
                "the sum of squares of its input {i} is {}, expected a finite number",
                squares[i]
            )));
        }
        let mut order: Vec<u32> = (0..squares.len() as u32).collect();
        order.sort_by(|a, b| squares[*a as usize].total_cmp(&squares[*b as usize]));
        let index = Tensor::from_slice(&order, order.len(), &Device::Cpu)?;
        let in_order = |x: Tensor| x.index_select(&index, 0)?.index_select(&index, 1);
        let missing = products.missing()?;
        let largest = missing.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
        let mut damping = options.damping;
        for _ in 0..=RETRIES {
            let own = Factor::new(&in_order(products.damped(damping)?)?)?;
            let correction = || -> Result<Option<Factor>> {
                let cautious = products.damped(damping.max(options.caution))?;
                Factor::new(&in_order(cautious)?)
            };
            let correction = match (&own, largest) {
                (None, _) => None,
                (Some(_), 0.) => Some(None),
                (Some(_), _) => correction()?.map(|factor| Some((factor, missing.clone()))),
            };
            if let (Some(own), Some(correction)) = (own, correction) {
                return Ok(Self {
                    order,
                    transposed: own.transposed()?,
                    diagonal: own.diagonal()?,
                    correction,
                });
            }
            damping = damping.max(1e-4) * 10.;
        }
        Err(failed(format!(
            "the products of its inputs are not positive definite, even with {damping} of their squares added"
        )))
    }

    /// Input features.
    pub fn features(&self) -> usize {
        self.order.len()
    }

    /// Features by position, as an index.
    pub(super) fn index(&self) -> Result<Tensor> {
        Ok(Tensor::from_slice(
            &self.order,
            self.order.len(),
            &Device::Cpu,
        )?)
    }

    /// Positions by feature, as an index.
    pub(super) fn places(&self) -> Result<Tensor> {
        let mut places = vec![0u32; self.order.len()];
        for (position, feature) in self.order.iter().enumerate() {
            places[*feature as usize] = position as u32;
        }
        Ok(Tensor::from_vec(places, self.order.len(), &Device::Cpu)?)
    }

    /// What is added to a weight, `[features, outputs]` in f64, to make up for what is missing in the inputs: in the order of positions.
    pub(super) fn correction(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let Some((factor, missing)) = &self.correction else {
            return Ok(None);
        };
        let missing = missing.matmul(weight)?.index_select(&self.index()?, 0)?;
        factor.solve(&missing).map(Some)
    }

    /// How much a squared error in each feature's weights counts once later features have made up for what they can.
    pub(super) fn importance(&self) -> Vec<f32> {
        let mut importance = vec![0f32; self.order.len()];
        for (feature, diagonal) in self.order.iter().zip(&self.diagonal) {
            importance[*feature as usize] = (diagonal * diagonal) as f32;
        }
        importance
    }
}
