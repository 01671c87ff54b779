//! The forward pass of a linear layer: on plain tensors, on scaled ones, and as an operation of a wide node.

use super::{Linear, Weight};
use crate::FilesError;
use crate::array::{Array, InNode, Layer, passed_on};
use crate::autocast::current;
use crate::error::{Error, Result};
use crate::nn::call::{Call, calibrate, noting_failure};
use crate::nn::scaled_parameter::{optional, scaled, value_of};
use candle_core::{DType, Module, Tensor};
use fp8_candle::ops::{self, LinearOptions};
use fp8_candle::{LinearPlan, LinearWeight, WeightSource, Wide, WideLinear, WideNode, fp8_linear};
use fp8_files::names::join;
use fp8_scaled::{Parameter, Scaled};
use std::sync::Arc;

impl Linear {
    /// [`Module::forward`] with an error that can be matched: candle's `Result` carries only the message of ours.
    ///
    /// # Errors
    /// [`fp8_candle::Error::InFeatures`] if the last dimension of `x` is not in_features, [`FilesError::TensorDType`] if `x` is not of
    /// a floating point dtype, and errors of the guard's recipe.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("linear", path = self.path()).entered();
        let context = current();
        let y = self
            .check_input(x.dims(), x.dtype())
            .and_then(|()| Call::decide(self, &self.state, context.as_ref()))
            .and_then(|call| self.compute(call, x));
        noting_failure(context.as_ref(), y)
    }

    /// The outputs of layers that read the same input, in order; each is the same as from its layer alone.
    ///
    /// # Errors
    /// Those of the first layer that fails.
    pub fn forward_joint<'a>(
        layers: impl IntoIterator<Item = &'a Self>,
        x: &Tensor,
    ) -> candle_core::Result<Vec<Tensor>> {
        let layers = layers.into_iter();
        layers.map(|layer| layer.forward(x)).collect()
    }

    fn compute(&self, call: Call<'_>, x: &Tensor) -> Result<Tensor> {
        let dtype = x.dtype();
        if let Some(source) = self.fetched_weight() {
            return self.fetching(call, x, &source);
        }
        let weight = match (&call, &self.weight) {
            (Call::Static(weight), _) => return Ok(weight.forward(x, self.bias())?),
            (_, Weight::Fp8(weight)) => weight.weight().dequantize(dtype)?,
            // Read in its own dtype.
            (_, Weight::HighPrecision(Parameter::Plain(weight))) if self.independent_rows => {
                weight.clone()
            }
            (_, Weight::HighPrecision(weight)) => weight.value(dtype)?,
        };
        let bias = value_of(self.bias.as_ref(), dtype)?;
        match call {
            Call::Fp8(state, plan) => {
                let weight = LinearWeight::HighPrecision(&weight, Some(&state.cache));
                return Ok(fp8_linear(x, weight, bias.as_ref(), &plan)?);
            }
            // The weight in f32, as an export reads it: its values may not fit in the dtype of the input.
            Call::Calibrate(state, step) => calibrate(&state, &step, x, || self.weight())?,
            Call::HighPrecision | Call::Static(_) | Call::Dequantized(_) => {}
        }
        self.product(x, &weight, bias.as_ref())
    }

    /// The result in high precision.
    fn product(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self.independent_rows {
            true => {
                let options = LinearOptions::default().with_operands(self.operands);
                Ok(ops::linear_with(x, weight, bias, options)?)
            }
            false => product(x, weight, bias),
        }
    }

    /// A call in high precision.
    fn plain_plan(&self) -> LinearPlan {
        LinearPlan::new(self.shown_path()).with_independent_rows(self.independent_rows)
    }

    /// The result with a weight that lies in parts on several ranks.
    fn fetching(
        &self,
        call: Call<'_>,
        x: &Tensor,
        source: &Arc<dyn WeightSource>,
    ) -> Result<Tensor> {
        let bias = value_of(self.bias.as_ref(), x.dtype())?;
        let plan = match call {
            Call::Fp8(_, plan) => *plan,
            Call::Calibrate(state, step) => {
                calibrate(&state, &step, x, || self.weight())?;
                self.plain_plan()
            }
            Call::HighPrecision | Call::Static(_) | Call::Dequantized(_) => self.plain_plan(),
        };
        let weight = LinearWeight::Fetched(source);
        Ok(fp8_linear(x, weight, bias.as_ref(), &plan)?)
    }

    fn check_input(&self, dims: &[usize], dtype: DType) -> Result<()> {
        let (_, in_features) = self.features();
        let got = dims.last().copied().unwrap_or(0);
        if got != in_features {
            return Err(fp8_candle::Error::InFeatures {
                path: self.shown_path().to_string(),
                expected: in_features,
                got,
                shape: dims.to_vec(),
            }
            .into());
        }
        if !dtype.is_float() || dtype == DType::F8E4M3 {
            return Err(FilesError::TensorDType {
                tensor: join(self.shown_path(), "input"),
                got: dtype.as_str().into(),
                expected: "f32, bf16, f16 or f64".into(),
            }
            .into());
        }
        Ok(())
    }

    fn on_scaled(&self, x: &Scaled) -> Result<Scaled> {
        let _span = tracing::trace_span!("linear", path = self.path()).entered();
        let weight = match &self.weight {
            Weight::HighPrecision(weight) => scaled(weight, self.path(), "weight")?,
            Weight::Fp8(weight) => {
                let held = Parameter::Plain(weight.weight().held().clone());
                scaled(&held, self.path(), "weight")?
            }
        };
        let bias = optional(self.bias.as_ref(), self.path(), "bias")?;
        self.check_input(x.dims(), DType::F32)?;
        Ok(x.linear(&weight, bias.as_ref())?)
    }
}

/// candle-nn's layer, with parameters cast to the dtype of `x`.
fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let weight = weight.to_dtype(x.dtype())?;
    let bias = bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
    let inner = candle_nn::Linear::new(weight, bias);
    if x.rank() == 1 {
        return Ok(inner.forward(&x.unsqueeze(0)?)?.squeeze(0)?);
    }
    Ok(inner.forward(x)?)
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl<A: Array> Layer<A> for Linear {
    fn apply(&self, x: &A) -> Result<A> {
        x.by_kind(
            |x| self.try_forward(x),
            |x| self.on_scaled(x),
            |x| x.operation(|node, x| Ok::<_, Error>(in_node(&[self], node, x)?.remove(0))),
        )
    }
}

/// The results of layers that read `x`. Within a node, casts of `x` that give the same codes are made once.
pub(in crate::nn) fn joint<A: Array>(layers: &[&Linear], x: &A) -> Result<Vec<A>> {
    x.by_kind_many(
        |x| layers.iter().map(|layer| layer.try_forward(x)).collect(),
        |x| layers.iter().map(|layer| layer.on_scaled(x)).collect(),
        |x: &InNode| x.operations(|node, x| in_node(layers, node, x)),
    )
}

/// The paths of layers that are computed together; None if one of them has none.
fn paths(layers: &[&Linear]) -> Option<String> {
    let paths = layers.iter().map(|layer| layer.path());
    let paths: Option<Vec<_>> = paths.collect();
    Some(paths?.join(", "))
}

/// A result for each of `layers`.
fn in_node(layers: &[&Linear], node: &mut WideNode, x: &Wide) -> Result<Vec<Wide>> {
    let _span = tracing::trace_span!("linear", path = paths(layers)).entered();
    let context = current();
    let mut calls = vec![];
    for layer in layers {
        layer.check_input(x.dims(), x.dtype())?;
        let call = Call::decide(*layer, &layer.state, context.as_ref())?;
        if let Call::Calibrate(state, step) = &call {
            calibrate(state, step, x.tensor()?, || layer.weight())?;
        }
        calls.push(call);
    }
    let sources: Vec<_> = layers.iter().map(|layer| layer.fetched_weight()).collect();
    let biases = layers.iter();
    let biases = biases.map(|layer| value_of(layer.bias.as_ref(), x.dtype()));
    let biases = biases.collect::<Result<Vec<_>>>()?;
    let plain: Vec<_> = layers.iter().map(|layer| layer.plain_plan()).collect();
    let mut together = vec![];
    for (i, (layer, call)) in layers.iter().zip(&calls).enumerate() {
        if let Weight::HighPrecision(weight) = &layer.weight {
            let (cache, plan) = match call {
                Call::Fp8(state, plan) => (Some(&state.cache), &**plan),
                _ => (None, &plain[i]),
            };
            let weight = match &sources[i] {
                Some(source) => LinearWeight::Fetched(source),
                None => LinearWeight::HighPrecision(weight.tensor(), cache),
            };
            together.push(WideLinear::new(weight, biases[i].as_ref(), Some(plan)));
        }
    }
    let mut together = node.linear_joint(x, &together)?.into_iter();
    let mut results = vec![];
    for ((layer, bias), call) in layers.iter().zip(&biases).zip(&calls) {
        let result = match call {
            Call::Static(weight) => {
                let weight = (*weight).clone();
                Some(frozen(node, x, bias.as_ref(), move |x, bias| {
                    Ok(weight.forward(x, bias)?)
                })?)
            }
            Call::Dequantized(weight) => {
                let (weight, layer) = ((*weight).clone(), (*layer).clone());
                Some(frozen(node, x, bias.as_ref(), move |x, bias| {
                    layer.product(x, &weight.weight().dequantize(x.dtype())?, bias)
                })?)
            }
            _ => together.next(),
        };
        results.extend(result);
    }
    match results.len() == layers.len() {
        true => Ok(results),
        false => Err(candle_core::Error::Msg("a linear layer without a result".into()).into()),
    }
}

/// Adds a layer with FP8 codes from a file: its weight gets no gradient, and candle differentiates `compute`.
fn frozen(
    node: &mut WideNode,
    x: &Wide,
    bias: Option<&Tensor>,
    compute: impl Fn(&Tensor, Option<&Tensor>) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Wide> {
    let bias = bias.map(|bias| node.argument(bias));
    let values: Vec<&Wide> = [Some(x), bias.as_ref()].into_iter().flatten().collect();
    let compute = move |args: &[Tensor]| compute(&args[0], args.get(1)).map_err(passed_on);
    Ok(node.apply(&values, compute)?)
}
