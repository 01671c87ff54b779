//! Data parallel training: every rank has the whole model and a part of the batch, and gradients are averaged over the ranks.
//!
//! | file | concern |
//! |---|---|
//! | `variables.rs` | the variables, in an order that all ranks share, and the check that they do |
//! | `plan.rs` | which gradients travel together, in which order |
//! | `pass.rs` | one backward pass: gradients leave while it runs |
//! | `travel.rs` | in which form they travel |
//! | `arrival.rs` | the sums that come back |

mod arrival;
mod pass;
mod plan;
mod travel;
mod variables;

use super::accumulator::GradAccumulator;
use super::error::Result;
use super::veto::JudgedCasts;
use arrival::Arrival;
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use fp8_ranks::{ProcessGroup, ReduceOp};
use pass::Pass;
use plan::{Plan, Width};
use std::rc::Rc;
use std::sync::Arc;
pub use travel::GradientTravel;
use variables::Variables;

/// How [`DataParallel`] sends gradients. Only [`DataParallelOptions::travel`] changes results.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataParallelOptions {
    /// Gradients of a layer, which are complete at the same time, travel together; layers are combined until they have this many
    /// bytes. Default: 1 MiB.
    pub bucket_bytes: usize,
    /// Whether gradients leave while the backward pass runs, in the order that the first pass has shown. Turn it off for a model that
    /// uses a parameter more often in some steps than in the first one. Default: true.
    pub overlap: bool,
    /// The form in which gradients travel. Default: unchanged.
    pub travel: GradientTravel,
    /// Whether all ranks begin with the values of rank 0. Default: true.
    pub broadcast_values: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self {
            bucket_bytes: 1 << 20,
            overlap: true,
            travel: GradientTravel::Unchanged,
            broadcast_values: true,
        }
    }
}

impl DataParallelOptions {
    /// The same options with another [`DataParallelOptions::bucket_bytes`].
    pub fn with_bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self {
            bucket_bytes,
            ..self
        }
    }

    /// The same options with or without [`DataParallelOptions::overlap`].
    pub fn with_overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// The same options with another [`DataParallelOptions::travel`].
    pub fn with_travel(self, travel: GradientTravel) -> Self {
        Self { travel, ..self }
    }

    /// The same options with or without [`DataParallelOptions::broadcast_values`].
    pub fn with_broadcast_values(self, broadcast_values: bool) -> Self {
        Self {
            broadcast_values,
            ..self
        }
    }
}

/// Averages gradients over the ranks of a group.
///
/// All ranks get the same gradients to the bit, so optimizers that begin alike stay alike. Sums are in the order of ranks (unless the
/// group asks for its engine's): N ranks with one micro-batch each give what one process gives that adds up N micro-batches with a
/// [`GradAccumulator`] and takes their mean, to the bit if gradients travel unchanged.
///
/// - Gradients of bf16 and f16 are added in f32. Where they travel as bf16 or f16, their sum is rounded before it is divided, and the mean is
///   rounded again; this changes no bit where N is a power of two, short of overflow and underflow. [`DataParallel::mean_of`] sends sums in
///   f32 and rounds once, as one process does.
/// - A variable without a gradient on some rank counts as zeros there; one without a gradient on all ranks has none.
/// - If a cast of any rank saw Inf or NaN, a gradient becomes NaN on all ranks, so that all optimizers skip the step.
/// - Only [`DataParallel`] communicates: micro-batches that a [`GradAccumulator`] adds up travel once, with
///   [`DataParallel::mean_of`].
///
/// Give the group to the guard too (`Autocast::reduction_group`), so that amaxes are the same on all ranks, and give each rank's micro-batch
/// its place (`Autocast::micro_batch`), so that stochastic rounding draws other bits on each.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fp8_optim::{AdamW, AdamWConfig, DataParallel, DataParallelOptions};
/// use fp8_ranks::threads;
///
/// // Two ranks; programs get their group from `fp8_ranks::World`.
/// let weights = threads::run(2, |group| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let model = candle_nn::linear(16, 8, vb.pp("fc"))?;
///     let mut parallel = DataParallel::new(&group, &vars, DataParallelOptions::default())?;
///     let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
///     for _ in 0..3 {
///         let own = Tensor::randn(0f32, 1., (4, 16), &Device::Cpu)?;
///         let grads = parallel.backward(&model.forward(&own)?.sqr()?.mean_all()?)?;
///         optimizer.apply(&grads)?;
///     }
///     Ok(model.weight().to_vec2::<f32>()?)
/// });
/// let weights: Result<Vec<_>, _> = weights.into_iter().collect();
/// let weights = weights.map_err(|error| error.to_string())?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug)]
pub struct DataParallel {
    group: ProcessGroup,
    variables: Arc<Variables>,
    options: DataParallelOptions,
    /// Known after the first pass.
    plan: Option<Arc<Plan>>,
    judged: JudgedCasts,
}

impl DataParallel {
    /// Averages the gradients of all variables of `vars` that are in it now. All ranks call it.
    ///
    /// # Errors
    /// [`OptimError::OtherVariables`](super::OptimError::OtherVariables) if the ranks have different variables, and errors of the group.
    pub fn new(group: &ProcessGroup, vars: &VarMap, options: DataParallelOptions) -> Result<Self> {
        let variables = Variables::of(vars);
        variables.check_ranks(group)?;
        if options.broadcast_values {
            variables.broadcast(group)?;
        }
        Ok(Self {
            group: group.clone(),
            variables: Arc::new(variables),
            options,
            plan: None,
            judged: JudgedCasts::default(),
        })
    }

    /// The group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The backward pass of this rank's `loss`, and the mean of the gradients over the ranks. Gradients of other variables are this
    /// rank's.
    ///
    /// # Errors
    /// Those of [`fp8_candle::wide::backward`], errors of the group, and
    /// [`OptimError::LateGradient`](super::OptimError::LateGradient).
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        let leaves_early = self.options.overlap && self.options.travel == GradientTravel::Unchanged;
        let plan = self.plan.clone().filter(|_| leaves_early);
        let pass = Rc::new(Pass::new(&self.group, &self.variables, plan));
        let grads = fp8_candle::wide::backward_with(loss, pass.clone());
        // The pass keeps its errors, because those of a listener have another type.
        let grads = grads.map_err(|error| pass.failed().unwrap_or_else(|| error.into()))?;
        let veto = self.variables.has_veto(&mut self.judged)?;
        let factor = 1. / self.group.size() as f64;
        self.finish(&pass, grads, veto, factor, Width::Variable)
    }

    /// The mean over the ranks of gradients that a backward pass has computed before, in the dtypes of the variables. Gradients of bf16 and
    /// f16 variables may be f32, as a loss scaler leaves those of f16: if one is on some rank, all ranks send all of theirs in f32.
    ///
    /// # Errors
    /// As [`DataParallel::backward`].
    pub fn mean(&mut self, grads: GradStore) -> Result<GradStore> {
        let veto = self.variables.has_veto(&mut self.judged)?;
        let width = self.agreed_width(&grads)?;
        let pass = Pass::new(&self.group, &self.variables, None);
        let factor = 1. / self.group.size() as f64;
        self.finish(&pass, grads, veto, factor, width)
    }

    /// The width of gradients that may have another dtype than their variable on some rank.
    fn agreed_width(&self, grads: &GradStore) -> Result<Width> {
        let is_other = |index: usize| {
            let var = self.variables.var(index);
            (grads.get(var)).is_some_and(|grad| grad.dtype() != var.dtype())
        };
        let own = (0..self.variables.len()).any(is_other);
        let own = Tensor::new(&[u32::from(own)], &Device::Cpu)?;
        let any = self.group.all_reduce(&own, ReduceOp::Max)?;
        Ok(match any.to_vec1::<u32>()?.contains(&1) {
            true => Width::Sum,
            false => Width::Variable,
        })
    }

    /// The weighted mean over the micro-batches of all ranks, in the dtypes of the variables; the next sum of `accumulator` begins empty.
    ///
    /// A rank adds up its own micro-batches first. With several on each rank, this is another order than that of one process with all of
    /// them, so the two may differ by rounding.
    ///
    /// # Errors
    /// As [`GradAccumulator::finish_mean`] and [`DataParallel::backward`].
    pub fn mean_of(&mut self, accumulator: &mut GradAccumulator) -> Result<GradStore> {
        let (sum, weight) = accumulator.take()?;
        let weight = Tensor::new(&[weight], &Device::Cpu)?;
        let weights = self.group.all_reduce(&weight, ReduceOp::Sum)?;
        let factor = 1. / weights.to_vec1::<f64>()?.iter().sum::<f64>();
        let pass = Pass::new(&self.group, &self.variables, None);
        // The sum is NaN if a micro-batch's casts saw Inf or NaN.
        self.finish(&pass, sum, false, factor, Width::Sum)
    }

    /// Sends what has not been sent, and puts what comes back in the place of this rank's gradients.
    fn finish(
        &mut self,
        pass: &Pass,
        mut grads: GradStore,
        veto: bool,
        factor: f64,
        width: Width,
    ) -> Result<GradStore> {
        let plan = match &self.plan {
            Some(plan) => plan.clone(),
            None => {
                let learned = pass.learned(&grads);
                let plan = Plan::agreed(
                    learned,
                    &self.variables,
                    &self.group,
                    self.options.bucket_bytes,
                )?;
                self.plan.insert(Arc::new(plan)).clone()
            }
        };
        let sent = pass.send_rest(&plan, &grads, self.options.travel, width)?;
        let arrival = Arrival::of(sent, &plan, &self.variables, &self.group, &grads, veto)?;
        arrival.replace(&mut grads, factor)?;
        Ok(grads)
    }
}
