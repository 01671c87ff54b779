//! A dense layer whose sizes come from its first input.

use super::{DenseConfig, DenseGeneral, dense_general};
use crate::autocast::{Mode, current};
use crate::error::{DenseError, Result};
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// flax's `Dense`: a [`DenseGeneral`] that takes its input sizes from its first input.
///
/// A VarBuilder makes a variable when its shape is known, so this layer keeps its VarBuilder and asks it for kernel and bias at the
/// first input, or in [`Dense::initialize`]. Until then it shows no parameters: initialize it **before** `prepare_fp8`, before the
/// optimizer collects the variables, and before a checkpoint is resumed. In a guard that computes in FP8 a layer without parameters is
/// refused, since nothing can have prepared it.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::nn::{self, Activation, DenseConfig};
/// # fn main() -> fp8_recipes::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = DenseConfig::new([32]).with_activation(Activation::Relu);
/// let layer = nn::Dense::new(config, vb.pp("fc"));
/// assert!(layer.get().is_err() && vars.all_vars().is_empty());
/// layer.forward(&Tensor::ones((2, 10), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(layer.get()?.kernel()?.dims(), [10, 32]);
/// assert_eq!(vars.all_vars().len(), 2);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Dense {
    config: DenseConfig,
    vb: VarBuilder<'static>,
    layer: Arc<(OnceLock<DenseGeneral>, Mutex<()>)>,
}

impl std::fmt::Debug for Dense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.vb.prefix();
        let layer = self.layer.0.get();
        f.debug_struct("Dense")
            .field("path", &path)
            .field("config", &self.config)
            .field("layer", &layer)
            .finish()
    }
}

impl Dense {
    /// A layer whose parameters are made later, in `vb`, or read from it.
    pub fn new(config: DenseConfig, vb: VarBuilder<'static>) -> Self {
        Self {
            config,
            vb,
            layer: Arc::default(),
        }
    }

    /// Path in the checkpoint.
    pub fn path(&self) -> String {
        self.vb.prefix()
    }

    /// The layer, once it has its parameters.
    ///
    /// # Errors
    /// [`DenseError::NotInitialized`] before that.
    pub fn get(&self) -> Result<&DenseGeneral> {
        self.layer.0.get().ok_or_else(|| {
            let path = self.path();
            DenseError::NotInitialized { path }.into()
        })
    }

    /// Makes or reads the parameters for inputs like one of this shape. A layer that has them keeps them.
    ///
    /// # Errors
    /// As [`dense_general`].
    pub fn initialize(&self, input: &[usize]) -> Result<&DenseGeneral> {
        let (layer, making) = &*self.layer;
        // Two threads must not both make the variables.
        let _making = making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layer) = layer.get() {
            return Ok(layer);
        }
        let made = dense_general(input, self.config.clone(), self.vb.clone())?;
        Ok(layer.get_or_init(|| made))
    }

    /// [`Module::forward`] with an error that can be matched.
    ///
    /// # Errors
    /// As [`DenseGeneral::try_forward`] and [`Dense::initialize`]; [`DenseError::NotInitialized`] for a first input in a guard that
    /// computes in FP8 or calibrates.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(layer) = self.layer.0.get() {
            return layer.try_forward(x);
        }
        if let Some(context) = current()
            && context.settings.mode != Mode::HighPrecision
        {
            context.note_failure();
            self.get()?;
        }
        self.initialize(x.dims())?.try_forward(x)
    }
}

impl Module for Dense {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

/// Shows nothing until the layer has its parameters.
impl Fp8Module for Dense {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.layer.0.get().visit(visitor);
    }
}
