//! A dense layer over any axes, of which each rank holds a part.

use super::shards::{group, shards};
use crate::error::{LayerError, Result};
use crate::module::show;
use crate::nn::{Activation, AxisNames, DenseConfig, DenseGeneral};
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use fp8_candle::LayerShards;
use fp8_ranks::graph::{sum_of_summands, used_in_parts};
use fp8_ranks::{DeviceMesh, ProcessGroup};

/// [`DenseGeneral`] in parts, where the names of the kernel's axes and their rules say how a [`DeviceMesh`] divides it.
///
/// Each rank gets x with its part of the contracted dimensions, divided as in the kernel, and returns y with its part of the features. The
/// tokens, which are the other dimensions of x, may be divided too. As in [`ParallelLinear`](super::ParallelLinear), casts have the scales of
/// the whole tensors, gradients of kernel and bias are those of this rank's tokens, and optimizers need
/// [`with_parts`](crate::optim::Engine::with_parts) to clip and skip steps on all ranks alike.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor, Var};
/// use fp8_ranks::{DeviceMesh, threads};
/// # use fp8_recipes as fp8;
/// use fp8::nn::{AxisRules, DenseConfig, ParallelDense};
///
/// let results = threads::run(2, |group| -> fp8::Result<Vec<usize>> {
///     let mesh = DeviceMesh::new(&group, &[("model", 2)])?;
///     let rules = AxisRules::new(["model"], [("embed", None), ("heads", Some("model")), ("kv", None)])?;
///     // The projection to four heads of eight features.
///     let config = DenseConfig::new([4, 8])
///         .with_bias(false)
///         .with_kernel_axes(["embed", "heads", "kv"])
///         .with_axis_rules(rules);
///     let kernel = Tensor::randn(0f32, 0.1, (16, 4, 8), &Device::Cpu)?;
///     let own = Var::from_tensor(&ParallelDense::part_of_kernel(&config, &kernel, &mesh)?)?;
///     assert_eq!(own.dims(), [16, 2, 8]);
///     let layer = ParallelDense::new(own.as_tensor().clone(), None, config, None, &mesh, "query")?;
///     let x = Tensor::ones((3, 16), DType::F32, &Device::Cpu)?;
///     Ok(layer.forward(&x)?.dims().to_vec())
/// });
/// for dims in results {
///     assert_eq!(dims?, [3, 2, 8]);
/// }
/// # Ok::<(), fp8::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ParallelDense {
    /// Without bias and activation where results are added.
    inner: DenseGeneral,
    bias: Option<Tensor>,
    activation: Option<Activation>,
    contracted: Option<ProcessGroup>,
    features: Option<ProcessGroup>,
}

impl ParallelDense {
    /// A layer of this rank's parts of kernel and bias, in flax's shapes. `config` is that of the whole layer; `tokens` is the axis that divides
    /// the other dimensions of x. All ranks of the mesh call it. Prepare it for FP8 afterwards.
    ///
    /// # Errors
    /// [`LayerError::Axes`] for batch axes, or if a dimension of the kernel has no name where others have one, one axis divides two
    /// dimensions of a tensor, or the bias is not divided like the features; errors of [`DenseGeneral::new`], and of the ranks.
    pub fn new(
        kernel: Tensor,
        bias: Option<Tensor>,
        config: DenseConfig,
        tokens: Option<&str>,
        mesh: &DeviceMesh,
        path: &str,
    ) -> Result<Self> {
        let problem = |problem: String| problem_of(path, &config, problem);
        if !config.batch_axis.is_empty() {
            return Err(problem("layers with batch axes are not divided".into()));
        }
        let assigned = assigned(&config, "kernel", &config.kernel_axes)?;
        let axes = config.axis.len();
        let dimensions = axes + config.features.len();
        if !assigned.is_empty() && assigned.len() != dimensions {
            let text =
                format!("the kernel has {dimensions} dimensions, and each of them needs a name");
            return Err(problem(text));
        }
        let names = |assigned: &[Option<String>]| assigned.iter().flatten().cloned().collect();
        let (contracted, features): (Vec<String>, Vec<String>) = match assigned.len() {
            0 => (vec![], vec![]),
            _ => (names(&assigned[..axes]), names(&assigned[axes..])),
        };
        let of_bias = self::assigned(&config, "bias", &config.bias_axes)?;
        if bias.is_some() && names(&of_bias) != features {
            let text = "the bias is not divided like the features of the kernel";
            return Err(problem(text.into()));
        }
        let (contracted, features) = (texts(&contracted), texts(&features));
        if let Some(tokens) = tokens.filter(|one| [&*contracted, &*features].concat().contains(one))
        {
            let text = format!("axis `{tokens}` divides two dimensions of x or y");
            return Err(problem(text));
        }
        let own = DenseConfig {
            features: kernel.dims()[kernel.rank().saturating_sub(config.features.len())..].to_vec(),
            ..config.clone()
        };
        let (inner, bias, activation) = match contracted.is_empty() {
            true => {
                let own = own.with_bias(bias.is_some());
                (DenseGeneral::new(kernel, bias, own)?, None, None)
            }
            false => {
                let own = own.with_bias(false).with_activation(None);
                (
                    DenseGeneral::new(kernel, None, own)?,
                    bias,
                    config.activation,
                )
            }
        };
        let tokens: Vec<&str> = tokens.into_iter().collect();
        let parts = LayerShards::new(
            shards(mesh, &tokens, &contracted)?,
            shards(mesh, &features, &contracted)?,
            shards(mesh, &tokens, &features)?,
        );
        Ok(Self {
            inner: inner.with_path(path).with_shards(parts),
            bias,
            activation,
            contracted: group(mesh, &contracted)?,
            features: group(mesh, &features)?,
        })
    }

    /// This rank's part of a whole kernel in flax's shape.
    ///
    /// # Errors
    /// If a dimension is not a multiple of the ranks along its axis, or the names do not fit.
    pub fn part_of_kernel(
        config: &DenseConfig,
        kernel: &Tensor,
        mesh: &DeviceMesh,
    ) -> Result<Tensor> {
        part(config, "kernel", kernel, &config.kernel_axes, mesh)
    }

    /// This rank's part of a whole bias.
    ///
    /// # Errors
    /// As [`ParallelDense::part_of_kernel`].
    pub fn part_of_bias(config: &DenseConfig, bias: &Tensor, mesh: &DeviceMesh) -> Result<Tensor> {
        part(config, "bias", bias, &config.bias_axes, mesh)
    }

    /// The layer of this rank's parts; it has neither bias nor activation where results are added.
    pub fn part(&self) -> &DenseGeneral {
        &self.inner
    }

    /// This rank's part of the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().or(self.inner.bias())
    }

    /// [`Module::forward`] with an error that can be matched.
    ///
    /// # Errors
    /// As [`DenseGeneral::try_forward`], and errors of the ranks.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.features {
            Some(group) => self.inner.try_forward(&used_in_parts(x, group)?)?,
            None => self.inner.try_forward(x)?,
        };
        let Some(group) = &self.contracted else {
            return Ok(y);
        };
        let mut y = sum_of_summands(&y, group)?;
        if let Some(bias) = &self.bias {
            y = y.broadcast_add(&bias.to_dtype(y.dtype())?)?;
        }
        match self.activation {
            Some(activation) => Ok(activation.forward(&y)?),
            None => Ok(y),
        }
    }
}

fn texts(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn problem_of(path: &str, config: &DenseConfig, problem: String) -> crate::Error {
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".into());
    let names: Vec<String> = config.kernel_axes.iter().map(name).collect();
    LayerError::Axes {
        path: path.into(),
        axes: format!("kernel axes [{}]", names.join(", ")),
        problem,
    }
    .into()
}

/// The mesh axis of each dimension; empty without names or rules.
fn assigned(config: &DenseConfig, tensor: &str, names: &AxisNames) -> Result<AxisNames> {
    match &config.axis_rules {
        Some(rules) => rules.assign(tensor, names),
        None => Ok(vec![]),
    }
}

fn part(
    config: &DenseConfig,
    tensor: &str,
    whole: &Tensor,
    names: &AxisNames,
    mesh: &DeviceMesh,
) -> Result<Tensor> {
    let mut own = whole.clone();
    for (dim, axis) in assigned(config, tensor, names)?.iter().enumerate() {
        let Some(axis) = axis else { continue };
        let Some(group) = group(mesh, &[axis])? else {
            continue;
        };
        let (len, ranks) = (own.dim(dim)?, group.size());
        if !len.is_multiple_of(ranks) {
            let text = format!("a dimension of {len} cannot be divided evenly over {ranks} ranks");
            return Err(problem_of(tensor, config, text));
        }
        own = own.narrow(dim, group.rank() * (len / ranks), len / ranks)?;
    }
    Ok(own.contiguous()?)
}

impl Module for ParallelDense {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl Fp8Module for ParallelDense {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(&self.inner);
        if let Some(bias) = &self.bias {
            show(visitor, self.inner.path(), "bias", bias);
        }
    }
}
