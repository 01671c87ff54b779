//! The layers of `nn` as operations of a wide node.

use super::{LayerNorm, Linear, Tensor, Wide, WideNode};
use crate::autocast::{Mode, current};
use crate::error::Result;
use crate::nn::linear::Call;
use candle_core::DType;
use fp8_candle::{LinearWeight, WideLinear};

/// Whether these layers can be operations of one node here.
pub(super) fn fits<'a>(
    norms: impl IntoIterator<Item = &'a LayerNorm>,
    linears: impl IntoIterator<Item = &'a Linear>,
) -> bool {
    let casts = in_fp8();
    norms
        .into_iter()
        .all(|norm| !(casts && norm.is_prepared()) && norm.is_plain())
        && linears
            .into_iter()
            .all(|linear| linear.scaled_weight().is_none())
}

/// Whether operations of a node compute in the dtype of `x`: their products have results up to f32.
pub(super) fn takes(x: &Tensor) -> bool {
    x.dtype() != DType::F64
}

/// Whether the innermost guard computes in FP8.
fn in_fp8() -> bool {
    current().is_some_and(|context| context.settings.mode == Mode::Fp8)
}

/// Runs `compute`, and tells the guard if it fails.
pub(super) fn noting_failure<T>(compute: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = compute();
    if let (Err(_), Some(context)) = (&done, current()) {
        context.note_failure();
    }
    done
}

/// `layer` of `x`.
pub(super) fn norm(node: &mut WideNode, layer: &LayerNorm, x: &Wide) -> Result<Wide> {
    let dtype = x.dtype();
    let (weight, bias) = (layer.weight(), layer.bias());
    // Norms multiply tensors of one dtype.
    let differs = |parameter: &Tensor| parameter.dtype() != dtype;
    if differs(weight) || bias.is_some_and(|bias| differs(bias) || !layer.remove_mean()) {
        let (layer, value) = (layer.clone(), node.argument(weight));
        let mut values = vec![x.clone(), value];
        values.extend(bias.map(|bias| node.argument(bias)));
        let values: Vec<&Wide> = values.iter().collect();
        return Ok(node.apply(&values, move |args| {
            let parameter = |i: usize| args.get(i).map(|tensor| tensor.to_dtype(dtype));
            let weight = parameter(1).transpose()?;
            let bias = parameter(2).transpose()?;
            Ok(layer.with_parameters(&args[0], weight.as_ref(), bias.as_ref())?)
        })?);
    }
    Ok(match layer.remove_mean() {
        true => node.layer_norm(x, weight, bias, layer.eps())?,
        false => node.rms_norm(x, weight, layer.eps())?,
    })
}

/// Layers that read `x`.
pub(super) fn linears(node: &mut WideNode, layers: &[&Linear], x: &Wide) -> Result<Vec<Wide>> {
    let calls = layers
        .iter()
        .map(|layer| layer.call_of(x.dims(), x.dtype(), || Ok(x.tensor()?.clone())))
        .collect::<Result<Vec<_>>>()?;
    let mut joint = vec![];
    for (layer, call) in layers.iter().zip(&calls) {
        let Some(weight) = layer.plain_weight() else {
            continue;
        };
        let cache = match call {
            Call::Fp8(state, _) => Some(&state.cache),
            Call::Plain => None,
        };
        let weight = LinearWeight::HighPrecision(weight, cache);
        joint.push(WideLinear::new(weight, layer.bias(), call.plan()));
    }
    let mut joint = node.linear_joint(x, &joint)?.into_iter();
    let mut results = vec![];
    for layer in layers {
        let result = match layer.static_forward() {
            None => joint.next(),
            Some(forward) => Some(static_linear(node, layer, x, forward)?),
        };
        results.extend(result);
    }
    Ok(results)
}

/// A layer of an FP8 checkpoint: no gradient goes to its weight, and candle's graph has that of x.
fn static_linear(
    node: &mut WideNode,
    layer: &Linear,
    x: &Wide,
    forward: impl Fn(&Tensor, Option<&Tensor>) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Wide> {
    let bias = layer.bias().map(|bias| node.argument(bias));
    let values: Vec<&Wide> = [Some(x), bias.as_ref()].into_iter().flatten().collect();
    Ok(node.apply(&values, move |args| {
        forward(&args[0], args.get(1)).map_err(|e| match e {
            crate::Error::Candle(e) => fp8_candle::Error::Candle(e),
            e => fp8_candle::Error::Candle(candle_core::Error::wrap(e)),
        })
    })?)
}

/// One layer that reads `x`.
pub(super) fn linear(node: &mut WideNode, layer: &Linear, x: &Wide) -> Result<Wide> {
    let mut results = linears(node, &[layer], x)?;
    match results.pop() {
        Some(result) => Ok(result),
        None => Err(candle_core::Error::Msg("a linear layer without a result".into()).into()),
    }
}

/// The shape of `x` as `[batch, tokens, features]`.
pub(super) fn dims3(op: &'static str, x: &[usize]) -> Result<[usize; 3]> {
    match *x {
        [batch, tokens, features] => Ok([batch, tokens, features]),
        _ => Err(fp8_candle::Error::Shape {
            op,
            what: "x",
            expected: "[batch, tokens, features]".into(),
            got: x.to_vec(),
        }
        .into()),
    }
}

/// The only value of a node with one argument.
pub(super) fn run(
    name: &'static str,
    recomputation: bool,
    x: &Tensor,
    forward: impl FnOnce(&mut WideNode, &Wide) -> Result<Wide>,
) -> Result<Tensor> {
    noting_failure(|| {
        let mut node = WideNode::new(name).with_recomputation(recomputation);
        let x = node.argument(x);
        let y = forward(&mut node, &x)?;
        Ok(node.finish(y)?)
    })
}
