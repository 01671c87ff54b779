//! A chain of layers that can be visited.

use crate::Fp8Module;
use candle_core::{Module, Result, Tensor};

trait Link: Module + Fp8Module {}
impl<T: Module + Fp8Module> Link for T {}

/// `candle_nn::Sequential` whose layers can be visited, so that those inside it can run in FP8.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// use fp8::{PrepareOptions, nn, prepare_fp8};
///
/// # fn main() -> candle_core::Result<()> {
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let mlp = nn::seq()
///     .add(nn::linear(4, 8, vb.pp("up"))?)
///     .add(nn::Activation::Relu)
///     .add(nn::linear(8, 2, vb.pp("down"))?)
///     .add_fn(|x| x * 0.5);
/// assert_eq!(prepare_fp8(&mlp, &PrepareOptions::default())?.converted(), 2);
/// assert_eq!(mlp.forward(&Tensor::zeros((3, 4), DType::F32, &Device::Cpu)?)?.dims(), [3, 2]);
/// # Ok(()) }
/// ```
#[derive(Default, Fp8Module)]
#[fp8(crate = "crate")]
pub struct Sequential {
    layers: Vec<Box<dyn Link>>,
}

/// An empty chain.
pub fn seq() -> Sequential {
    Sequential::default()
}

impl Sequential {
    /// Number of layers.
    pub fn len(&self) -> i64 {
        self.layers.len() as i64
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Appends a layer. A closure goes to [`Sequential::add_fn`], since what it captures cannot be visited.
    #[allow(clippy::should_implement_trait)] // candle-nn's name.
    #[must_use]
    pub fn add<M: Module + Fp8Module + 'static>(mut self, layer: M) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Appends a closure. Visitors do not see the parameters that it captures.
    #[must_use]
    pub fn add_fn<F>(self, f: F) -> Self
    where
        F: 'static + Fn(&Tensor) -> Result<Tensor> + Send + Sync,
    {
        self.add(candle_nn::func(f))
    }

    /// The output of each layer.
    ///
    /// # Errors
    /// If a layer fails.
    pub fn forward_all(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        let mut outputs: Vec<Tensor> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            outputs.push(layer.forward(outputs.last().unwrap_or(xs))?);
        }
        Ok(outputs)
    }
}

impl Module for Sequential {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.layers
            .iter()
            .try_fold(xs.clone(), |xs, layer| layer.forward(&xs))
    }
}
