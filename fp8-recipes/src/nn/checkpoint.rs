//! Activation checkpointing: memory for time.
//!
//! `autocast/replay.rs` explains how the second run gets the scales of the first, `fp8_candle::wide::recompute` what happens to
//! its graph.

use crate::array::passed_on;
use crate::autocast::{AutocastHandle, RunLog};
use crate::error::{Error, Result};
use candle_core::Tensor;
use fp8_candle::wide::recompute;
use std::sync::Arc;

/// Computes `f(x)` without keeping its activations: the backward pass runs `f` again to get them, like Transformer Engine's
/// `te.checkpoint`.
///
/// Loss, gradients and FP8 state equal those without a checkpoint bit for bit, under every recipe, whether or not the guard is
/// still open in the backward pass: casts of the second run reuse the scales and random bits of the first, and are not recorded,
/// counted or observed again. One rounding may differ: if a tensor is used in more than two places, some of them inside `f`, its
/// gradients are added in another order.
///
/// # Requirements on `f`
/// - candle can differentiate it, and it computes the same each time: dropout by a seed ([`LayerInputs`](super::LayerInputs)),
///   not by [`Dropout`](super::Dropout). Code with side effects asks [`is_recomputing`](crate::is_recomputing).
/// - Its variables keep their values until the backward pass, which fails otherwise (on a GPU only if changes are
///   [announced](fp8_candle::weight_version)).
/// - It owns what it captures; layers and tensors are cheap to clone.
/// - It may open guards, and [`AutocastHandle`]s that are taken inside it or opened on its own thread.
///
/// # Errors
/// Those of `f`. Errors of the second run come from `backward` with their message, and from [`fp8_candle::wide::backward`] as
/// [`fp8_candle::Error`]: `RecomputedValues`, `RecomputedVariables` and `RecomputedShape` if `f` computes something else.
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
    run(move |args: &[Tensor]| Ok(f(&args[0])?), &[x])
}

/// [`checkpoint`] of a function of several tensors. Inputs that track no gradient get none, and may have any dtype.
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
    // The second run must not keep the step alive.
    let outside = here.rerun(&log);
    recompute(
        "checkpoint",
        inputs,
        |args| first.run(|| f(args))?,
        move |args| {
            let second = outside.rerun(&log);
            let y = second.run(|| again(args)).and_then(|y| y);
            y.map_err(passed_on)
        },
    )
}
