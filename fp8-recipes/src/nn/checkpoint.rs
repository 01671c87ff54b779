//! Activation checkpointing: memory for time.
//!
//! How the second run gets the scales of the first is explained in `autocast/replay.rs`, what becomes of its graph in
//! `fp8_candle::wide::recompute`.

use crate::autocast::{AutocastHandle, RunLog};
use crate::error::{Error, Result};
use candle_core::Tensor;
use fp8_candle::wide::recompute;
use std::sync::Arc;

/// `f(x)`, keeping nothing of what lies in between: the backward pass runs `f` again for its activations. As Transformer Engine's
/// `te.checkpoint`.
///
/// Loss, gradients and FP8 state are to the bit those without a checkpoint, under every recipe, whether the guard is still open
/// in the backward pass or not: casts of the second run have the scales and random bits of the first, and nothing records,
/// counts or observes them again. One rounding may differ: where a tensor is used in more than two places, of which some are
/// inside `f`, its gradients are added up in another order.
///
/// # What `f` has to be
/// - Differentiable by candle, and the same each time: dropout by a seed ([`LayerInputs`](super::LayerInputs)), not by
///   [`Dropout`](super::Dropout). What has other effects asks [`is_recomputing`](crate::is_recomputing).
/// - Its variables must keep their values until the backward pass, else that fails (on the CPU; on a GPU where changes are
///   [announced](fp8_candle::weight_version)).
/// - It owns what it captures; layers and tensors are cheap to clone.
/// - It may open guards, and [`AutocastHandle`]s that are taken inside of it, or opened on its own thread.
///
/// # Errors
/// Those of `f`. Those of the second run come from `backward`, with their message; from [`fp8_candle::wide::backward`] as
/// [`fp8_candle::Error`]: `RecomputedValues`, `RecomputedVariables` and `RecomputedShape` if `f` is not the same again.
///
/// # Examples
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn::{LayerInputs, TransformerConfig, checkpoint, transformer_layer};
/// use fp8::{fp8_autocast, prepare_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = transformer_layer(&TransformerConfig::new(16, 2).with_causal(true), vb)?;
/// prepare_fp8(&layer, &Default::default())?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let guard = fp8_autocast("delayed")?;
/// let y = checkpoint(move |x| layer.forward(x, &LayerInputs::default()), &x)?;
/// guard.close()?;
/// let grads = y.sqr()?.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok(()) }
/// ```
pub fn checkpoint<F, E>(f: F, x: &Tensor) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor, E> + Send + Sync + 'static,
    Error: From<E>,
{
    let of_one = move |args: &[Tensor]| -> Result<Tensor> {
        match args {
            [x] => Ok(f(x)?),
            _ => Err(fp8_candle::Error::Internal(format!(
                "checkpoint: {} inputs of one",
                args.len()
            ))
            .into()),
        }
    };
    run(of_one, &[x])
}

/// [`checkpoint`] of a function of several tensors. A tensor that no gradient goes to stays so, of whatever dtype.
///
/// # Errors
/// As [`checkpoint`].
///
/// # Examples
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{Device, Tensor, Var};
/// use fp8::nn::checkpoint_many;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Var::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let rows = Tensor::new(&[1u32, 1], &Device::Cpu)?;
/// let y = checkpoint_many(|args| args[0].index_select(&args[1], 0)?.sqr(), &[x.as_tensor(), &rows])?;
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[0., 0.], [12., 16.]]);
/// # Ok(()) }
/// ```
pub fn checkpoint_many<F, E>(f: F, inputs: &[&Tensor]) -> Result<Tensor>
where
    F: Fn(&[Tensor]) -> Result<Tensor, E> + Send + Sync + 'static,
    Error: From<E>,
{
    run(move |args: &[Tensor]| Ok(f(args)?), inputs)
}

fn run(
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    inputs: &[&Tensor],
) -> Result<Tensor> {
    let f = Arc::new(f);
    let again = f.clone();
    let log = Arc::new(RunLog::default());
    let here = AutocastHandle::current();
    let first = here.logged(&log);
    // Nothing of the step is held.
    let outside = here.rerun(&log);
    recompute(
        "checkpoint",
        inputs,
        |args| first.run(|| f(args))?,
        move |args| {
            let second = outside.rerun(&log);
            let y = second.run(|| again(args)).and_then(|y| y);
            y.map_err(|error| match error {
                Error::Candle(error) => error.into(),
                Error::Fp8(error) => error,
                other => candle_core::Error::wrap(other).into(),
            })
        },
    )
}
