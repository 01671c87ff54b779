//! Linear layers of a wide node.

use crate::base::data::matrix_dims;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, internal};
use crate::cast::quantizer::Quantizer;
use crate::cast::replay::RecordedCast;
use crate::cast::tensor::{Fp8Tensor, Quantized, multiply};
use crate::cast::weight_version::Seen;
use crate::device::GemmOutput;
use crate::graph::wide::kept::Kept;
use crate::graph::wide::memos::Memos;
use crate::graph::wide::reader::Reader;
use crate::graph::wide::sweep::{Backward, Step};
use crate::graph::wide::value::Value;
use crate::graph::wide::{Wide, WideNode};
use crate::layers::linear::{
    HeldWeight, LinearBackward, LinearPlan, LinearWeight, SavedCasts, compute,
};
use candle_core::{DType, Tensor};
use fp8_core::Contraction::Cols;
use std::cell::{OnceCell, RefCell};
use std::sync::Arc;

/// One of several linear layers that read the same input: see [`WideNode::linear_joint`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct WideLinear<'a> {
    /// `[N, K]`
    pub weight: LinearWeight<'a>,
    /// `[N]`
    pub bias: Option<&'a Tensor>,
    /// None multiplies in high precision, with a weight in high precision only.
    pub plan: Option<&'a LinearPlan>,
}

impl<'a> WideLinear<'a> {
    /// A layer.
    pub fn new(
        weight: LinearWeight<'a>,
        bias: Option<&'a Tensor>,
        plan: Option<&'a LinearPlan>,
    ) -> Self {
        Self { weight, bias, plan }
    }
}

/// What the backward pass of one layer needs.
struct Layer {
    plan: LinearPlan,
    saved: SavedCasts<Fp8Tensor>,
    /// How to make the codes of x again, if they are not kept.
    recast: Option<RecordedCast>,
    /// x, unless kept codes serve everything that reads it.
    input: Option<Reader>,
    dtype: DType,
    dims: Vec<usize>,
    weight: HeldWeight,
    bias: Option<Tensor>,
    /// The values of the bias, where the result is computed again.
    bias_seen: Option<Seen>,
    /// The values of x, weight and bias.
    ids: [Option<usize>; 3],
}

impl WideNode {
    /// `x weight^T + bias`: [`fp8_linear`](crate::fp8_linear) with a plan, candle's product in high precision without one.
    ///
    /// # Shapes
    /// x `[.., K]`, weight `[N, K]`, bias `[N]`; result `[.., N]` in x's dtype.
    ///
    /// # Errors
    /// As [`fp8_linear`](crate::fp8_linear).
    pub fn linear(
        &mut self,
        x: &Wide,
        weight: LinearWeight<'_>,
        bias: Option<&Tensor>,
        plan: Option<&LinearPlan>,
    ) -> Result<Wide> {
        self.linear_with(x, WideLinear { weight, bias, plan }, None)
    }

    /// Layers that read the same input. Where their casts of it give the same codes, as tensorwise and rowwise casts with equal
    /// scales do, it is cast once, and counted and recorded for each.
    ///
    /// # Errors
    /// As [`WideNode::linear`].
    pub fn linear_joint(&mut self, x: &Wide, layers: &[WideLinear<'_>]) -> Result<Vec<Wide>> {
        let mut first: Option<(Quantizer, Quantized)> = None;
        let mut results = vec![];
        for layer in layers {
            let cast = match layer.plan.and_then(|plan| plan.output.as_ref()) {
                None => None,
                Some(gemm) => Some(match &first {
                    Some((quantizer, quantized))
                        if gemm.a.gives_the_codes_of(quantizer, quantized)? =>
                    {
                        gemm.a.note_shared(|| x.value.get(), quantized)?;
                        quantized.clone()
                    }
                    _ => {
                        let quantized = x.cast(&gemm.a, true)?;
                        first.get_or_insert((gemm.a.clone(), quantized.clone()));
                        quantized
                    }
                }),
            };
            results.push(self.linear_with(x, *layer, cast)?);
        }
        Ok(results)
    }

    fn linear_with(
        &mut self,
        x: &Wide,
        WideLinear { weight, bias, plan }: WideLinear<'_>,
        quantized: Option<Quantized>,
    ) -> Result<Wide> {
        let plain;
        let plan = match plan {
            Some(plan) => plan,
            None => {
                plain = LinearPlan::new(self.name);
                &plain
            }
        };
        let ids = [
            x.id,
            weight.held().and_then(|weight| self.leaf(weight)),
            bias.and_then(|bias| self.leaf(bias)),
        ];
        let tracks = (ids[0].is_some(), ids[1].is_some());
        let both = tracks.1 && plan.saves_input();
        let quantized = match (quantized, &plan.output) {
            (None, Some(gemm)) if x.recast => Some(x.cast(&gemm.a, true)?),
            (None, Some(gemm)) => x.value.cast(&gemm.a, both)?,
            (quantized, _) => quantized,
        };
        let cast = quantized.as_ref().map(|quantized| quantized.tensor.clone());
        let input = match cast.is_some() {
            true => x.value.shaped()?,
            false => x.value.get()?.clone(),
        };
        let bias_seen = bias.filter(|_| self.recomputes).map(Seen::of).transpose()?;
        let (storage, dims, mut saved) = compute(&input, weight, bias, plan, tracks, cast)?;
        let recast = quantized
            .filter(|_| x.recast && saved.input.take().is_some())
            .map(|quantized| RecordedCast::of(&quantized))
            .transpose()?;
        let tensor = tensor_of(storage, dims)?;
        if ids.iter().all(Option::is_none) {
            return Ok(Wide::held(tensor, None));
        }
        let reads_input = recast.is_some() || ids[1].is_some() && saved.input.is_none();
        let layer = Arc::new(Layer {
            plan: plan.clone(),
            saved,
            recast,
            input: reads_input.then(|| self.keep(x)).transpose()?,
            dtype: x.value.dtype(),
            dims: x.dims().to_vec(),
            weight: HeldWeight::new(weight),
            bias: bias.map(Tensor::detach),
            bias_seen,
            ids,
        });
        let kept = match self.recomputes && layer.can_repeat() {
            true => {
                let (layer, dims) = (layer.clone(), tensor.dims().to_vec());
                Kept::again(move |memos| layer.repeat(memos, &dims))
            }
            false => Kept::Tensor(tensor.clone()),
        };
        let (id, own) = (self.new_value(), kept.memo());
        self.steps.push(Step {
            outputs: vec![id],
            backward: Backward::One(Box::new(move |sweep, grad| {
                let Layer { ids, .. } = *layer;
                sweep.memos.forget(own);
                let codes = match &layer.recast {
                    None => None,
                    Some(recast) => Some(replay(recast, &layer.input(&mut sweep.memos)?)?),
                };
                let saved = codes.map(|codes| SavedCasts {
                    input: Some(codes),
                    ..layer.saved.clone()
                });
                let memos = RefCell::new(&mut sweep.memos);
                let pass = LinearBackward {
                    plan: &layer.plan,
                    saved: saved.as_ref().unwrap_or(&layer.saved),
                    input: &|| layer.input(&mut memos.borrow_mut()),
                    dtype: layer.dtype,
                    weight: &layer.weight,
                    bias: layer.bias.as_ref().map(Tensor::dtype),
                    grad_output: grad,
                    matrix: OnceCell::new(),
                };
                let [dx, dw, db] = pass.gradients(ids.map(|id| id.is_some()))?;
                if let Some(input) = &layer.input {
                    input.done(&mut sweep.memos);
                }
                for (id, grad) in ids.into_iter().zip([dx, dw, db]) {
                    if let (Some(_), Some(grad)) = (id, grad) {
                        let grad = match id == ids[0] {
                            true => grad.reshape(layer.dims.as_slice())?,
                            false => grad,
                        };
                        sweep.add(id, grad)?;
                    }
                }
                Ok(())
            })),
        });
        Ok(Wide::kept_as(Value::Made(tensor), Some(id), kept))
    }
}

impl Wide {
    /// The cast of this value, row by row if it can be.
    fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Quantized> {
        match self.value.cast(quantizer, both)? {
            Some(quantized) => Ok(quantized),
            None => quantizer.quantize_for(&rows(self.value.get()?)?, Cols, true),
        }
    }
}

impl Layer {
    /// x.
    fn input(&self, memos: &mut Memos) -> Result<Tensor> {
        match &self.input {
            Some(input) => input.get(memos),
            None => internal!("fp8_linear `{}`: its input is not kept", self.plan.path),
        }
    }

    /// Whether the result follows to the bit from codes that are kept anyway.
    fn can_repeat(&self) -> bool {
        let casts = &self.saved;
        (casts.input.is_some() || self.recast.is_some())
            && casts.weight.is_some()
            && self.plan.output.is_some()
            && self.plan.results.output.is_none()
    }

    /// The result once more.
    fn repeat(&self, memos: &mut Memos, dims: &[usize]) -> Result<Tensor> {
        let casts = &self.saved;
        let again = match &self.recast {
            Some(recast) => Some(replay(recast, &self.input(memos)?)?),
            None => None,
        };
        let input = again.as_ref().or(casts.input.as_ref());
        let (Some(x8), Some(w8), Some(gemm)) = (input, &casts.weight, &self.plan.output) else {
            internal!(
                "fp8_linear `{}`: no codes to repeat the product of",
                self.plan.path
            );
        };
        let bias = self
            .bias
            .as_ref()
            .map(|bias| bias.to_dtype(self.dtype))
            .transpose()?;
        let out = GemmOutput {
            dtype: self.dtype,
            bias: bias.as_ref(),
            use_fast_accum: gemm.use_fast_accum,
        };
        let storage = multiply((x8, Cols), (w8, Cols), &out, self.plan.emulate)?;
        if let (Some(seen), Some(bias)) = (&self.bias_seen, &self.bias) {
            seen.check(bias, &self.plan.path, "bias")?;
        }
        tensor_of(storage, dims)
    }
}

/// `x` as a contiguous matrix `[product of the leading dims, last dim]`.
fn rows(x: &Tensor) -> Result<Tensor> {
    let (m, k) = matrix_dims(x.dims());
    Ok(x.contiguous()?.reshape((m, k))?)
}

/// The codes of `x` once more.
fn replay(cast: &RecordedCast, x: &Tensor) -> Result<Fp8Tensor> {
    let cast = Quantizer::from(cast.clone());
    Ok(cast.quantize_for(&rows(x)?, Cols, true)?.tensor)
}
