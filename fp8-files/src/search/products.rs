//! Sums of products of a layer's inputs.

use crate::error::{Error, Result};
use candle_core::{D, DType, Device, Tensor};

/// Sums over the tokens of samples of products of a layer's inputs: all that the search needs to know of them.
///
/// An input has two values: the one that the layer *multiplies* when it is served, after the layers before it and the cast of the input
/// have changed it, and the one that is *meant*, which the model has in high precision.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_files::search::InputProducts;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut products = InputProducts::new(2)?;
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// products.add(&x, &x)?;
/// assert_eq!(products.tokens(), 2);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct InputProducts {
    /// Multiplied by multiplied, `[features, features]` in f32.
    own: Tensor,
    /// Multiplied by meant.
    cross: Tensor,
    tokens: usize,
}

impl InputProducts {
    /// Sums for a layer of so many input features, without a sample.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn new(features: usize) -> Result<Self> {
        let zeros = Tensor::zeros((features, features), DType::F32, &Device::Cpu)?;
        Ok(Self {
            own: zeros.clone(),
            cross: zeros,
            tokens: 0,
        })
    }

    /// Input features.
    pub fn features(&self) -> usize {
        self.own.dims().last().copied().unwrap_or(0)
    }

    /// How many tokens were added.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds the inputs of some tokens, `[.., features]`: the values that are multiplied and those that are meant.
    ///
    /// # Errors
    /// [`Error::TensorShape`] if they differ in shape or have other features.
    pub fn add(&mut self, multiplied: &Tensor, meant: &Tensor) -> Result<()> {
        let features = self.features();
        for x in [multiplied, meant] {
            if x.dims().last() != Some(&features) || x.dims() != multiplied.dims() {
                return Err(Error::TensorShape {
                    tensor: "inputs of a search".into(),
                    got: x.dims().to_vec(),
                    expected: format!("{features} features, as of {:?}", multiplied.dims()),
                });
            }
        }
        let rows = |x: &Tensor| -> Result<Tensor> {
            let x = x.to_dtype(DType::F32)?.reshape(((), x.dim(D::Minus1)?))?;
            Ok(x.contiguous()?)
        };
        let (x, y) = (rows(multiplied)?, rows(meant)?);
        let t = x.t()?;
        self.own = (&self.own + t.matmul(&x)?)?;
        self.cross = (&self.cross + t.matmul(&y)?)?;
        self.tokens += x.dim(0)?;
        Ok(())
    }

    /// The products of the served inputs with their errors (reference inputs less served ones), in f64.
    pub(super) fn missing(&self) -> Result<Tensor> {
        let [cross, own] = [&self.cross, &self.own].map(|sum| sum.to_dtype(DType::F64));
        Ok((cross? - own?)?)
    }

    /// The products of what is multiplied with itself in f64, with a part `damping` of each input's own square added to it. Features
    /// without any input get a small number instead.
    pub(super) fn damped(&self, damping: f64) -> Result<Tensor> {
        let squares = self.squares()?;
        let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
        let least = match mean {
            0. => 1.,
            mean => mean * 1e-6,
        };
        let k = squares.len();
        let mut values = (self.own.to_dtype(DType::F64)?.flatten_all()?).to_vec1::<f64>()?;
        for (i, square) in squares.iter().enumerate() {
            values[i * k + i] += (square * damping).max(least);
        }
        Ok(Tensor::from_vec(values, (k, k), &Device::Cpu)?)
    }

    /// The sum of squares of each input as it is multiplied.
    pub(super) fn squares(&self) -> Result<Vec<f64>> {
        let k = self.features();
        let values = self.own.flatten_all()?.to_vec1::<f32>()?;
        Ok((0..k).map(|i| f64::from(values[i * k + i])).collect())
    }
}
