//! flax's dense layers: any axes, features of any shape, the input width from the first input.
//!
//! | file | concern |
//! |---|---|
//! | `config.rs`, `init.rs` | options; first values |
//! | `axes.rs` | which dimension of an input is which |
//! | `build.rs` | making a layer, or reading one of three stored forms |
//! | `forward.rs` | the forward pass |
//! | `lazy.rs` | [`Dense`], whose sizes come from its first input |
//! | `axis_rules.rs` | names of dimensions, and the mesh axes that split them |

mod axes;
mod axis_rules;
mod build;
mod config;
mod forward;
mod init;
mod lazy;

pub use axis_rules::{AxisNames, AxisRules};
pub use build::dense_general;
pub use config::DenseConfig;
pub use init::{FanMode, InitDistribution, Initializer};
pub use lazy::Dense;

use super::StaticWeight;
use super::identity::{SharedState, path_and_state, path_methods};
use crate::autocast::Fp8State;
use crate::error::Result;
use crate::module::{Fp8Layer, LayerKind};
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Tensor};
use fp8_candle::{LayerShards, Role};
use std::sync::Arc;

#[derive(Debug, Clone)]
enum Weight {
    /// Of any shape whose elements, in order, are those of flax's kernel.
    Kernel(Tensor),
    /// `[features, contracted]`
    Fp8(Box<StaticWeight>),
}

/// flax's `DenseGeneral`: sums over any axes of its input, with features of any shape.
///
/// # Shapes
///
/// | | shape |
/// |---|---|
/// | kernel | batch sizes, contracted sizes, features |
/// | bias | batch sizes, features |
/// | result | batch sizes, the other sizes of the input, features |
///
/// Batch and contracted dimensions are in the order of the input, whatever the order of the configured axes.
///
/// # FP8
///
/// Outside a guard, or unprepared, it multiplies in high precision. Prepared and inside an enabled guard:
///
/// - Without batch axes the layer is one linear layer, with the product of the features as out_features and the product of the
///   contracted sizes as in_features. Its kernel is cast as `[out_features, in_features]`, as the weight of [`Linear`](super::Linear) is, so a
///   rowwise cast gives each output its own scale. Recipes, reports, the weight cache, calibration, exports and checkpoints treat it as a
///   [`Linear`](super::Linear); an export stores the matrix under `weight`.
/// - With batch axes each index of them is a product of its own. A tensorwise cast sees the input, the kernel or the gradient as one
///   tensor, as flax's FP8 einsum does: one amax, one scale. Scales of rows, blocks and groups belong to one product; no block reaches
///   into the next. The report calls such a layer `batched linear`, and an export keeps it in high precision.
///
/// # Stored forms
///
/// | tensor | shape | from |
/// |---|---|---|
/// | `kernel` | the kernel's | flax, and this layer |
/// | `kernel` | `[product of contracted sizes, product of features]` | fp8layers; also new layers with [`DenseConfig::stored_as_matrix`] |
/// | `weight` | `[product of features, product of contracted sizes]`, in FP8 with its scales or not | an export |
///
/// The bias has its own shape, or is flat. A file with both a `kernel` and a `weight` is refused.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::nn::{self, DenseConfig};
/// # fn main() -> fp8_recipes::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// // The published example: (2, 3, 6, 7), summed over 3 and 7.
/// let config = DenseConfig::new([4, 5]).with_axis([1, -1]);
/// let layer = nn::dense_general(&[2, 3, 6, 7], config, vb.pp("dense"))?;
/// assert_eq!(layer.kernel()?.dims(), [3, 7, 4, 5]);
/// let x = Tensor::randn(0f32, 1., (2, 3, 6, 7), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [2, 6, 4, 5]);
/// # Ok(()) }
/// ```
///
/// Clones share kernel and FP8 state.
#[derive(Debug, Clone)]
pub struct DenseGeneral {
    weight: Weight,
    bias: Option<Tensor>,
    batch: Vec<usize>,
    contracted: Vec<usize>,
    config: Arc<DenseConfig>,
    path: Option<Arc<str>>,
    shards: Option<Arc<LayerShards>>,
    state: SharedState,
}

impl DenseGeneral {
    /// The same layer as a part of one that several ranks hold: it casts its tensors with the scales of the whole ones. Prepare it
    /// afterwards.
    pub fn with_shards(self, shards: LayerShards) -> Self {
        Self {
            shards: Some(Arc::new(shards)),
            ..self
        }
    }

    /// The kernel in flax's shape: a view of the variable, or the dequantized codes of a layer loaded in FP8, in f32.
    ///
    /// # Errors
    /// If a device fails.
    pub fn kernel(&self) -> Result<Tensor> {
        let dims = self.kernel_dims();
        Ok(match &self.weight {
            Weight::Kernel(kernel) => kernel.reshape(dims)?,
            Weight::Fp8(weight) => {
                let matrix = weight.weight().dequantize(DType::F32)?;
                matrix.t()?.contiguous()?.reshape(dims)?
            }
        })
    }

    /// The kernel as it is stored: the variable of an optimizer. None for a layer loaded in FP8.
    pub fn stored_kernel(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::Kernel(kernel) => Some(kernel),
            Weight::Fp8(_) => None,
        }
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The FP8 weight of a layer loaded from an FP8 checkpoint, `[product of features, product of contracted sizes]`.
    pub fn static_weight(&self) -> Option<&StaticWeight> {
        match &self.weight {
            Weight::Kernel(_) => None,
            Weight::Fp8(weight) => Some(weight),
        }
    }

    /// The options.
    pub fn config(&self) -> &DenseConfig {
        &self.config
    }

    /// Sizes of the batch axes.
    pub fn batch_sizes(&self) -> &[usize] {
        &self.batch
    }

    /// Sizes of the axes that are summed over.
    pub fn contracted_sizes(&self) -> &[usize] {
        &self.contracted
    }

    /// FP8 state, if the layer is prepared.
    pub fn fp8_state(&self) -> Option<Arc<Fp8State>> {
        self.state.get()
    }

    /// The mesh axis that splits each dimension of the stored kernel, by the rules of the configuration; empty without names or rules.
    pub fn kernel_mesh_axes(&self) -> AxisNames {
        self.assigned("kernel", &self.config.kernel_axes)
    }

    /// The mesh axis that splits each dimension of the bias, by the rules of the configuration; empty without names or rules.
    pub fn bias_mesh_axes(&self) -> AxisNames {
        self.assigned("bias", &self.config.bias_axes)
    }

    /// The constructor has checked that this gives no error.
    fn assigned(&self, tensor: &str, names: &AxisNames) -> AxisNames {
        let rules = self.config.axis_rules.as_ref();
        let assigned = rules.map(|rules| rules.assign(tensor, names));
        assigned.and_then(Result::ok).unwrap_or_default()
    }

    fn kernel_dims(&self) -> Vec<usize> {
        [&*self.batch, &*self.contracted, &*self.config.features].concat()
    }

    /// (product of features, product of contracted sizes).
    fn sizes(&self) -> (usize, usize) {
        (
            self.config.features.iter().product(),
            self.contracted.iter().product(),
        )
    }

    fn shown_path(&self) -> &str {
        self.path().unwrap_or("without a path")
    }
}

path_methods!(DenseGeneral, state);

impl Fp8Layer for DenseGeneral {
    path_and_state!();

    fn kind(&self) -> LayerKind {
        match self.batch.is_empty() {
            true => LayerKind::Linear,
            false => LayerKind::BatchedLinear,
        }
    }

    fn roles(&self) -> &'static [Role] {
        &[Role::Input, Role::Weight, Role::GradOutput]
    }

    fn held_weight(&self) -> &Tensor {
        match &self.weight {
            Weight::Kernel(kernel) => kernel,
            Weight::Fp8(weight) => weight.weight().held(),
        }
    }

    fn weight_name(&self) -> &'static str {
        match &self.weight {
            Weight::Kernel(_) => "kernel",
            Weight::Fp8(_) => "weight",
        }
    }

    fn weight_matrix(&self) -> candle_core::Result<Option<Tensor>> {
        let (n, k) = self.sizes();
        match &self.weight {
            Weight::Kernel(kernel) if self.batch.is_empty() => {
                let values = kernel.detach().to_dtype(DType::F32)?;
                Ok(Some(values.reshape((k, n))?.t()?.contiguous()?))
            }
            _ => Ok(None),
        }
    }

    fn static_weight(&self) -> Option<&StaticWeight> {
        DenseGeneral::static_weight(self)
    }

    fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    fn shards(&self) -> Option<Arc<LayerShards>> {
        self.shards.clone()
    }

    fn features(&self) -> (usize, usize) {
        self.sizes()
    }

    /// A batch norm is not folded into this layer.
    fn output_dim(&self) -> Option<usize> {
        None
    }
}

impl Fp8Module for DenseGeneral {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(self);
    }
}
