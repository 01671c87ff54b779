//! A training step that is recorded once, as a CUDA graph, and run again with one call.

use crate::base::error::{Error, Result};
use crate::cast::state::Lasting;
use crate::cast::weight_version::{WeightVersion, changes_of};
use crate::device::cuda::recording::{Graph, Recording, copy_into, with_kept_uploads};
use candle_core::{Device, Tensor};

/// Steps that run as usual before one is recorded. The first loads kernels, chooses algorithms of products and copies constants to
/// the device; after the second, delayed scaling has scales of every role.
const AS_USUAL: usize = 2;

/// A step of training, as one CUDA graph. The host takes some 5 microseconds for each of the hundreds of kernels of a step, and for
/// a graph about as long as for one kernel: small models, whose kernels are done sooner than the host starts the next ones, train
/// faster.
///
/// Recorded steps give the bits of usual ones.
///
/// A graph does on the device what the recorded step did, with the same memory and the same numbers from the host. Between two runs,
/// weights, moments of the optimizer, its count of steps, and the scales and histories of delayed scaling move on. What the host
/// decides does not:
///
/// - New inputs go into the memory of the old ones: keep them in a [`Var`](candle_core::Var) and use `Var::set`.
/// - The learning rate and other settings stay those of the recorded step. To change them, record again.
/// - Stochastic casts are refused, since they count on the host. Do not use other random numbers in the step (dropout).
/// - The step may not read anything from the device (`to_scalar`, what an optimizer's report says). What it copies to the device
///   (`Tensor::new`) has to be the same in each step, and stays so.
/// - Tensors that the step makes may not outlive it, except those that it returns; a tensor that was made before may not be dropped
///   in it.
///
/// What is not allowed is an [`Error::NotRecordable`] when the step is recorded, except for numbers that the host chooses.
///
/// The step is kept, so what it borrows stays borrowed: its tensors must stay where they are. [`RecordedStep::into_step`] gives it
/// back, to evaluate or to save a checkpoint.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor, Var};
/// use fp8_candle::{Error, RecordedStep};
///
/// // SAFETY: the only CUDA device of this program.
/// let device = unsafe { fp8_candle::device::open_cuda_untracked(0) }?;
/// let x = Var::zeros((64, 512), DType::BF16, &device)?;
/// let forward_and_backward_and_update = || -> Result<Tensor, Error> { Ok(x.sqr()?) };
/// let step = RecordedStep::new(&device, || Ok::<_, Error>(vec![forward_and_backward_and_update()?]))?;
/// for batch in 0..1000 {
///     x.set(&Tensor::full(batch as f32, (64, 512), &device)?.to_dtype(DType::BF16)?)?;
///     step.run()?;
/// }
/// let loss = &step.results()[0];
/// # Ok::<(), Error>(())
/// ```
pub struct RecordedStep<F> {
    // Before the step, whose tensors it uses.
    graph: Graph,
    results: Vec<Tensor>,
    changed: Vec<WeightVersion>,
    step: F,
}

impl<F, E> RecordedStep<F>
where
    F: FnMut() -> std::result::Result<Vec<Tensor>, E>,
    E: From<Error>,
{
    /// Takes three steps: two as usual, and a third that is recorded and then run. The tensors that `step` returns, always as many of
    /// the same shapes and dtypes, are its results, for example its loss.
    ///
    /// The tables of delayed scaling are those of the models whose weights an optimizer changes in the step.
    ///
    /// `device`: one that records no events for its tensors, see
    /// [`open_cuda_untracked`](crate::device::open_cuda_untracked).
    ///
    /// # Errors
    /// Those of `step`; [`Error::NotRecordable`] with the reason; those of the device. After an error while it is recorded the step
    /// has not been taken, although counters that `step` keeps on the host include it.
    pub fn new(device: &Device, step: F) -> std::result::Result<Self, E> {
        let recorded = with_kept_uploads(device, || Self::record(device, step))?;
        recorded.run()?;
        Ok(recorded)
    }

    fn record(device: &Device, mut step: F) -> std::result::Result<Self, E> {
        let mut made = vec![];
        let mut changed = vec![];
        for _ in 0..AS_USUAL {
            let (result, changes) = changes_of(&mut step);
            (made, changed) = (result?, changes);
        }
        let results = made.iter().map(|x| x.detach().force_contiguous());
        let results = results.collect::<candle_core::Result<Vec<_>>>();
        let results = results.map_err(Error::from)?;
        drop(made);
        let lasting = lasting(&changed)?;
        let recording = Recording::begin(device)?;
        if let Err(error) = once(&mut step, &results) {
            // The table must free the recording's memory before recording stops.
            drop(lasting);
            return Err(error);
        }
        let kept = lasting.into_iter().map(Lasting::put_back);
        let kept = kept.collect::<Result<Vec<_>>>()?;
        let graph = recording.end()?;
        drop(kept);
        Ok(Self {
            graph,
            results,
            changed,
            step,
        })
    }
}

impl<F> RecordedStep<F> {
    /// Runs the step. It waits for nothing: the results are those of this run for everything that the device is asked to do later.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn run(&self) -> Result<()> {
        self.graph.launch()?;
        // Cached codes of these weights are now stale.
        self.changed.iter().for_each(WeightVersion::announce_change);
        Ok(())
    }

    /// What the step returned, of its last run. These tensors stay the same; each run writes new values into them.
    pub fn results(&self) -> &[Tensor] {
        &self.results
    }

    /// The step itself, to be taken as usual again.
    pub fn into_step(self) -> F {
        self.step
    }
}

/// The step while it is recorded, its results copied to where they stay.
fn once<E: From<Error>>(
    step: &mut impl FnMut() -> std::result::Result<Vec<Tensor>, E>,
    results: &[Tensor],
) -> std::result::Result<(), E> {
    let made = step()?;
    if made.len() != results.len() {
        let (now, before) = (made.len(), results.len());
        let why = format!("it returns {now} tensors where it returned {before} before");
        return Err(Error::NotRecordable(why).into());
    }
    for (made, result) in made.iter().zip(results) {
        let made = made.contiguous().map_err(Error::from)?;
        copy_into(&made, result)?;
    }
    Ok(())
}

/// The tables of the models that have these parameters, each once.
fn lasting(changed: &[WeightVersion]) -> Result<Vec<Lasting>> {
    let mut tables = vec![];
    for table in changed.iter().flat_map(WeightVersion::tables) {
        if !tables
            .iter()
            .any(|known| std::sync::Arc::ptr_eq(known, &table))
        {
            tables.push(table);
        }
    }
    tables.iter().map(Lasting::of).collect()
}
