//! A linear layer of which each rank holds a part.

use super::axes::LinearAxes;
use crate::error::Result;
use crate::module::show;
use crate::nn::Linear;
use crate::nn::scaled_parameter::value_of;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use candle_nn::{Init, VarBuilder};
use fp8_ranks::graph::{gathered, gathered_for_own_data, own_part, sum_of_summands, used_in_parts};
use fp8_ranks::{DeviceMesh, ProcessGroup};
use fp8_scaled::Parameter;

/// `y = x weight^T + bias`, where each rank of a [`DeviceMesh`] holds the parts that [`LinearAxes`] says: tensor parallel layers, with tokens
/// divided or not.
///
/// All ranks call it at the same place, each with its part of x, and get their part of y. Casts have the scales of the whole tensors, so codes
/// and scales are those of the layer on one rank; sums have the order of the parts.
///
/// | axes | a rank | forward | backward |
/// |---|---|---|---|
/// | output | has some output features ([`column_parallel_linear`]) | nothing | gradients of x are added |
/// | input and contracted | has some input features and their part of x ([`row_parallel_linear`]) | results are added | nothing |
/// | contracted alone | has some input features | takes its part of x; results are added | gradients of x are gathered |
/// | input alone | has all input features | x is gathered | takes its part of the gradient |
/// | contracted and batch, the same | has some input features, and some of the tokens | the weight is gathered | its gradient is averaged and scattered |
///
/// Gradients of weight and bias are those of this rank's tokens: [`DataParallel`](crate::optim::DataParallel) averages them over the axis of
/// the batch. The weight of the last row is an exception: its gradient is averaged already, and ranks of the axis of the batch hold different
/// columns under one name, which `DataParallel` would overwrite and mix. Keep such weights in a `VarMap` of their own, and give `DataParallel`
/// the one with all other variables, the bias of that layer among them; the optimizer gets the variables of both.
///
/// An optimizer knows the parts of its rank only. Call [`with_parts`](crate::optim::Engine::with_parts) with the axis that divides weights:
/// otherwise `max_grad_norm` clips by another norm on each rank, and a gradient or cast that is not finite on one rank makes only that rank skip
/// the step, so variables that ranks hold whole (the bias of a row parallel layer, norms, a head) drift apart without an error.
///
/// Delayed scaling needs the guard's group to be all ranks of the mesh.
#[derive(Debug, Clone)]
pub struct ParallelLinear {
    /// Without the bias where results are added.
    inner: Linear,
    bias: Option<Parameter>,
    axes: LinearAxes,
    input: Option<ProcessGroup>,
    contracted: Option<ProcessGroup>,
    output: Option<ProcessGroup>,
}

impl ParallelLinear {
    /// A layer of this rank's parts of weight and bias ([`LinearAxes::part_of_weight`]). All ranks of the mesh call it. Prepare it for FP8
    /// afterwards.
    ///
    /// # Errors
    /// [`LayerError::Axes`](crate::LayerError::Axes) for an axis that the mesh does not have, or that divides two dimensions of one tensor, and
    /// errors of the ranks.
    pub fn new(
        weight: Tensor,
        bias: Option<Tensor>,
        axes: LinearAxes,
        mesh: &DeviceMesh,
        path: &str,
    ) -> Result<Self> {
        axes.check(path)?;
        let group = |axis| axes.group(path, axis, mesh);
        let (input, contracted, output) = (
            group(&axes.input)?,
            group(&axes.contracted)?,
            group(&axes.output)?,
        );
        let (own, after) = match axes.summed() {
            None => (bias, None),
            Some(_) => (None, bias),
        };
        let inner = Linear::new(weight, own).with_path(path);
        Ok(Self {
            inner: inner.with_shards(axes.shards(path, mesh)?),
            bias: after.as_ref().map(Parameter::of),
            axes,
            input,
            contracted,
            output,
        })
    }

    /// The layer of this rank's parts. Its weight is `[out_features, in_features]` of this rank; it has no bias where results are added.
    pub fn part(&self) -> &Linear {
        &self.inner
    }

    /// The axes.
    pub fn axes(&self) -> &LinearAxes {
        &self.axes
    }

    /// This rank's part of the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        let own = self.bias.as_ref().map(Parameter::tensor);
        own.or(self.inner.bias())
    }

    /// [`Module::forward`] with an error that can be matched.
    ///
    /// # Errors
    /// As [`Linear::try_forward`], and errors of the ranks.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        let summed = self.axes.summed();
        let mut x = x.clone();
        if self.axes.input != *summed {
            if let Some(group) = &self.input {
                x = gathered(&x, group)?;
            }
            if let (Some(_), Some(group)) = (summed, &self.contracted) {
                x = own_part(&x, group)?;
            }
        }
        if let Some(group) = &self.output {
            x = used_in_parts(&x, group)?;
        }
        let y = match &self.contracted {
            Some(group) if self.axes.gathers_weight() => {
                let weight = gathered_for_own_data(&self.inner.weight()?, group)?;
                self.inner.with_weight(&weight).try_forward(&x)?
            }
            _ => self.inner.try_forward(&x)?,
        };
        let y = match (summed, &self.contracted) {
            (Some(_), Some(group)) => sum_of_summands(&y, group)?,
            _ => y,
        };
        match value_of(self.bias.as_ref(), y.dtype())? {
            Some(bias) => Ok(y.broadcast_add(&bias.to_dtype(y.dtype())?)?),
            None => Ok(y),
        }
    }
}

impl Module for ParallelLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl Fp8Module for ParallelLinear {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(&self.inner);
        if let Some(bias) = &self.bias {
            show(visitor, self.inner.path(), "bias", bias.tensor());
        }
    }
}

/// A layer with a bias whose output features are divided over `axis`: x is whole on each rank, y in parts. `vb` holds this rank's
/// part; a new one begins like a part of [`linear`](crate::nn::linear()). Optimizers need
/// [`with_parts`](crate::optim::Engine::with_parts): here `is_part` holds for weight and bias.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_ranks::{DeviceMesh, threads};
/// # use fp8_recipes as fp8;
/// use fp8::nn::{column_parallel_linear, row_parallel_linear};
///
/// // An MLP whose hidden features are divided.
/// let results = threads::run(2, |group| -> fp8::Result<Vec<f32>> {
///     let mesh = DeviceMesh::new(&group, &[("model", 2)])?;
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let up = column_parallel_linear(16, 64, vb.pp("up"), &mesh, "model")?;
///     let down = row_parallel_linear(64, 16, vb.pp("down"), &mesh, "model")?;
///     let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
///     let hidden = up.try_forward(&x)?;
///     assert_eq!(hidden.dims(), [4, 32]);
///     Ok(down.try_forward(&hidden.relu()?)?.flatten_all()?.to_vec1()?)
/// });
/// let results = results.into_iter().collect::<fp8::Result<Vec<_>>>()?;
/// assert_eq!(results[0], results[1]);
/// # Ok::<(), fp8::Error>(())
/// ```
///
/// # Errors
/// As [`ParallelLinear::new`], and if a tensor is missing or has another shape.
pub fn column_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    vb: VarBuilder<'_>,
    mesh: &DeviceMesh,
    axis: &str,
) -> Result<ParallelLinear> {
    let axes = LinearAxes::new().with_output(axis);
    let part = share(&axes, &vb, mesh, axis, out_dim)?;
    let weight = vb.get_with_hints((part, in_dim), "weight", initial(in_dim))?;
    let bound = 1. / (in_dim as f64).sqrt();
    let init = Init::Uniform {
        lo: -bound,
        up: bound,
    };
    let bias = vb.get_with_hints(part, "bias", init)?;
    ParallelLinear::new(weight, Some(bias), axes, mesh, &vb.prefix())
}

/// A layer with a bias whose input features are divided over `axis`: x is in parts, y whole on each rank. `vb` holds this rank's
/// part of the weight, and the bias, which begins at 0: it must be the same on all ranks. For it to stay the same, optimizers need
/// [`with_parts`](crate::optim::Engine::with_parts), where `is_part` holds for the weight alone.
///
/// # Errors
/// As [`column_parallel_linear`].
pub fn row_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    vb: VarBuilder<'_>,
    mesh: &DeviceMesh,
    axis: &str,
) -> Result<ParallelLinear> {
    let axes = LinearAxes::new().with_input(axis).with_contracted(axis);
    let part = share(&axes, &vb, mesh, axis, in_dim)?;
    let weight = vb.get_with_hints((out_dim, part), "weight", initial(in_dim))?;
    let bias = vb.get_with_hints(out_dim, "bias", Init::Const(0.))?;
    ParallelLinear::new(weight, Some(bias), axes, mesh, &vb.prefix())
}

/// candle-nn's initialization of a linear layer with this number of input features.
fn initial(in_features: usize) -> Init {
    Init::Randn {
        mean: 0.,
        stdev: (2. / in_features as f64).sqrt(),
    }
}

/// The features of one rank.
fn share(
    axes: &LinearAxes,
    vb: &VarBuilder<'_>,
    mesh: &DeviceMesh,
    axis: &str,
    features: usize,
) -> Result<usize> {
    let path = vb.prefix();
    let group = axes.group(&path, &Some(axis.to_string()), mesh)?;
    let ranks = group.map_or(1, |group| group.size());
    match features.is_multiple_of(ranks) {
        true => Ok(features / ranks),
        false => {
            let problem =
                format!("{features} features cannot be divided evenly over {ranks} ranks");
            Err(axes.problem(&path, problem))
        }
    }
}
