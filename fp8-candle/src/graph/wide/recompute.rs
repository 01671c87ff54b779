//! A function as one node that keeps no intermediate results.
//!
//! The first time the function runs on copies of its inputs, which end the walk of its graph: what candle's
//! `sorted_nodes` finds before the result is this function's own. The variables found there become arguments of the node
//! beside the inputs, and the graph is dropped. The backward pass runs the function again on fresh copies and sweeps that
//! graph with the gradient that has come.

use crate::base::error::{Error, Result};
use crate::cast::weight_version::Seen;
use crate::graph::{self, Ready, attach, attach_all};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use std::cell::Cell;

/// Runs `first` on `inputs` as one node of the graph. The node keeps the inputs, the variables that the function uses, and
/// `again`, with which the backward pass rebuilds the graph. Both must give the same bits; `first` may record what `again`
/// needs.
///
/// Inputs outside any graph get no gradient. What the function captures may be part of a graph, but that part is swept
/// separately, so FP8 layers in it cast this gradient apart from the others that they get: pass computed tensors as inputs
/// instead.
///
/// # Errors
/// The errors of `first`. The backward pass fails with the errors of `again`, and with [`Error::RecomputedValues`],
/// [`Error::RecomputedVariables`] or [`Error::RecomputedShape`] where something has changed in between; candle's `backward` gives
/// their messages, [`backward`](super::backward) the errors themselves.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fp8_candle::wide::recompute;
/// let (x, w) = (Var::new(&[1f32, 2.], &Device::Cpu)?, Var::new(&[3f32, 4.], &Device::Cpu)?);
/// let weight = w.as_tensor().clone();
/// let f = move |args: &[Tensor]| Ok((args[0].sqr()? * &weight)?.exp()?);
/// let y = recompute("f", &[x.as_tensor()], f.clone(), f)?;
/// let grads = y.sum_all()?.backward()?;
/// let y = y.to_vec1::<f32>()?;
/// assert_eq!(grads.get(&w).unwrap().to_vec1::<f32>()?, [y[0], 4. * y[1]]);
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [2. * 3. * y[0], 4. * 4. * y[1]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn recompute<E: From<Error> + From<candle_core::Error>>(
    name: &'static str,
    inputs: &[&Tensor],
    first: impl FnOnce(&[Tensor]) -> Result<Tensor, E>,
    again: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor, E> {
    let kept = inputs.iter().copied().map(Input::new);
    let kept = kept.collect::<Result<Vec<_>>>()?;
    let copies = copies(&kept)?;
    let y = first(&copies)?;
    let variables = variables(&y, &copies);
    drop(copies);
    let seen = variables.iter().map(Seen::of).collect::<Result<Vec<_>>>()?;
    let result = y.detach();
    // The graph.
    drop(y);
    let tracked = inputs.iter().filter(|x| x.track_op());
    let arguments: Vec<Tensor> = tracked.copied().chain(&variables).cloned().collect();
    let pass = Again {
        inputs: kept,
        variables,
        seen,
        dims: result.dims().to_vec(),
        run: Box::new(again),
    };
    let arguments: Vec<&Tensor> = arguments.iter().collect();
    let result = Ready::of(&result)?;
    let backward = move |_: &[&Tensor], _: &Tensor, grad: &Tensor| pass.gradients(grad);
    Ok(attach_all(name, &arguments, result, backward)?)
}

/// An input, outside any graph.
struct Input {
    value: Tensor,
    tracked: bool,
    /// If it is a variable: nothing else changes in place.
    seen: Option<Seen>,
}

impl Input {
    fn new(x: &Tensor) -> Result<Self> {
        Ok(Self {
            value: x.detach(),
            tracked: x.track_op(),
            seen: x.is_variable().then(|| Seen::of(x)).transpose()?,
        })
    }
}

/// Copies of the inputs, at which a walk of the graph ends.
fn copies(inputs: &[Input]) -> candle_core::Result<Vec<Tensor>> {
    let copy = |input: &Input| match input.tracked {
        true => Ok(Var::from_tensor(&input.value)?.into_inner()),
        false => Ok(input.value.clone()),
    };
    inputs.iter().map(copy).collect()
}

/// The variables that `y` is made of, but for `copies`.
fn variables(y: &Tensor, copies: &[Tensor]) -> Vec<Tensor> {
    let nodes = y.sorted_nodes().into_iter();
    let is_copy = |x: &Tensor| copies.iter().any(|copy| copy.id() == x.id());
    let variables = nodes.filter(|x| x.is_variable() && !is_copy(x));
    variables.cloned().collect()
}

type Run = dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync;

/// The second run.
struct Again {
    inputs: Vec<Input>,
    variables: Vec<Tensor>,
    /// By variable.
    seen: Vec<Seen>,
    /// Sizes of the result.
    dims: Vec<usize>,
    run: Box<Run>,
}

impl Again {
    /// The gradients of the tracked inputs, then of the variables.
    fn gradients(&self, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let inputs = self.inputs.iter();
        let inputs = inputs.filter_map(|input| Some((&input.value, input.seen.as_ref()?)));
        for (variable, seen) in self.variables.iter().zip(&self.seen).chain(inputs) {
            if !seen.holds(variable)? {
                return Err(Error::RecomputedValues {
                    shape: variable.dims().to_vec(),
                    dtype: variable.dtype(),
                });
            }
        }
        let copies = copies(&self.inputs)?;
        let y = in_second_run(|| (self.run)(&copies))?;
        if y.dims() != self.dims {
            return Err(Error::RecomputedShape {
                first: self.dims.clone(),
                again: y.dims().to_vec(),
            });
        }
        self.check(&variables(&y, &copies))?;
        let grads = sweep(y, grad)?;
        let tracked = copies.iter().zip(&self.inputs);
        let tracked = tracked.filter_map(|(copy, input)| input.tracked.then_some(copy));
        let gradient = |x: &Tensor| grads.get(x).cloned();
        Ok(tracked.chain(&self.variables).map(gradient).collect())
    }

    fn check(&self, now: &[Tensor]) -> Result<()> {
        let missing_in = |list: &[Tensor], of: &[Tensor]| {
            let is_there = |x: &&Tensor| list.iter().any(|other| other.id() == x.id());
            of.iter().find(|x| !is_there(x)).cloned()
        };
        let error = |variable: Tensor, what| Error::RecomputedVariables {
            what,
            shape: variable.dims().to_vec(),
            first: self.variables.len(),
            again: now.len(),
        };
        match (
            missing_in(now, &self.variables),
            missing_in(&self.variables, now),
        ) {
            (Some(lost), _) => Err(error(lost, "no longer")),
            (_, Some(new)) => Err(error(new, "only now")),
            (None, None) => Ok(()),
        }
    }
}

thread_local! {
    static SECOND_RUN: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread computes a function again whose backward pass follows at once.
pub(crate) fn is_second_run() -> bool {
    SECOND_RUN.get()
}

fn in_second_run<T>(run: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            SECOND_RUN.set(self.0);
        }
    }
    let _before = Before(SECOND_RUN.replace(true));
    run()
}

/// The gradients of everything that `y` was computed from, given the gradient of `y`. Collects variables' gradients past candle's store if the
/// sweep around it does: sums then have the order that they have without a node around them.
fn sweep(y: Tensor, grad: &Tensor) -> Result<GradStore> {
    let zero = Tensor::zeros((), DType::F32, y.device())?;
    let grad = grad.clone();
    let end = attach("recompute-end", [&y], Ready::of(&zero)?, move |_, _, _| {
        Ok([Some(grad.clone())])
    })?;
    drop(y);
    match graph::is_open() {
        true => graph::backward(&end),
        false => Ok(end.backward()?),
    }
}
