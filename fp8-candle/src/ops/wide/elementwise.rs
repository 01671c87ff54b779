//! Elementwise operations of a wide node.

use crate::base::error::Result;
use crate::cast::kept::KeptTensor;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::add;
use crate::graph::wide::codes::Codes;
use crate::graph::wide::kept::Kept;
use crate::graph::wide::reader::Reader;
use crate::graph::wide::value::{RowSource, Value};
use crate::graph::wide::{Wide, WideNode};
use crate::ops::Activation;
use crate::ops::dropout;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// The result of an activation.
struct Activated {
    x: Tensor,
    activation: Activation,
    /// The codes of `x`, if this is where they are made.
    codes: Option<Arc<Codes>>,
}

impl RowSource for Activated {
    fn make(&self) -> Result<Tensor> {
        if let Some(codes) = &self.codes {
            codes.get()?;
        }
        self.activation.apply(&self.x)
    }

    fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Option<Quantized>> {
        cast_and_fill(self.codes.as_deref(), |keep| {
            self.activation.cast_rows(&self.x, (quantizer, both), keep)
        })
    }
}

/// A cast that may also make codes in groups of this many features; they go to `codes`.
pub(super) fn cast_and_fill(
    codes: Option<&Codes>,
    cast: impl FnOnce(Option<usize>) -> Result<Option<(Quantized, Option<Fp8Tensor>)>>,
) -> Result<Option<Quantized>> {
    let Some((quantized, kept)) = cast(codes.and_then(Codes::wanted))? else {
        return Ok(None);
    };
    if let (Some(codes), Some(kept)) = (codes, kept) {
        codes.fill(kept);
    }
    Ok(Some(quantized))
}

/// The gradient of the input of an activation.
struct ActivationGradient {
    x: KeptTensor,
    grad: Tensor,
    activation: Activation,
}

impl RowSource for ActivationGradient {
    fn make(&self) -> Result<Tensor> {
        self.activation.backward(&self.x.get()?, &self.grad)
    }

    fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Option<Quantized>> {
        let (x, grad, cast) = (&self.x, &self.grad, (quantizer, both));
        let cast = self.activation.cast_gradient(x, grad, cast, None)?;
        Ok(cast.map(|(quantized, _)| quantized))
    }

    fn cast_and_sum(
        &self,
        quantizer: &Quantizer,
        both: bool,
        dtype: DType,
    ) -> Result<Option<(Quantized, Tensor)>> {
        let (x, grad, cast) = (&self.x, &self.grad, (quantizer, both));
        let cast = self.activation.cast_gradient(x, grad, cast, Some(dtype))?;
        Ok(cast.and_then(|(quantized, sums)| Some((quantized, sums?))))
    }
}

impl WideNode {
    /// `a + b`, of one shape and dtype: a residual. Its gradient goes to both without a copy.
    ///
    /// # Errors
    /// If shapes or dtypes differ.
    pub fn add(&mut self, a: &Wide, b: &Wide) -> Result<Wide> {
        let tensor = add(a.value.get()?, b.value.get()?)?;
        let ids = [a.id, b.id];
        Ok(self.record_tensor(tensor, &ids, move |sweep, grad| {
            sweep.add_shared(ids[0], grad)?;
            sweep.add_shared(ids[1], grad)
        }))
    }

    /// [`Activation::apply`]. The backward pass keeps `x`, or what `x` is computed from again.
    ///
    /// # Errors
    /// As [`Activation::apply`].
    pub fn activation(&mut self, x: &Wide, activation: Activation) -> Result<Wide> {
        let tensor = x.value.get()?;
        let casts_rows = activation.casts_rows(tensor)?;
        let (input, codes) = self.keep_for(x, x.id.is_some(), casts_rows.is_some())?;
        let value = match casts_rows {
            None => Value::Made(activation.apply(tensor)?),
            Some(dims) => {
                let source = Activated {
                    x: tensor.clone(),
                    activation,
                    codes,
                };
                Value::later(&dims, tensor.dtype(), tensor.device(), source)
            }
        };
        let kept = match self.computes_again(&[&input]) {
            true => {
                let x = input.clone();
                Kept::again(move |memos| activation.apply(&x.get(memos)?))
            }
            false => Kept::Value(value.clone()),
        };
        let (id, own) = (x.id, kept.memo());
        let recast = self.recomputes && own.is_some();
        let y = self.record(value, kept, &[id], move |sweep, grad| {
            sweep.memos.forget(own);
            let x = input.finish_kept(&mut sweep.memos)?;
            let grad = grad.contiguous()?;
            // If it is only cast, it is cast as it is computed.
            let (dims, dtype, device) = (x.dims().to_vec(), x.dtype(), x.device().clone());
            let source = ActivationGradient {
                x: x.contiguous()?,
                grad,
                activation,
            };
            sweep.add_value(id, Value::later(&dims, dtype, &device, source))
        });
        Ok(Wide { recast, ..y })
    }

    /// A gated `activation` of a gate and a value in two tensors of one shape.
    ///
    /// # Errors
    /// If the shapes differ or the activation is not gated.
    pub fn gated_activation(
        &mut self,
        gate: &Wide,
        value: &Wide,
        activation: Activation,
    ) -> Result<Wide> {
        let tensor = activation.apply_pair(gate.value.get()?, value.value.get()?)?;
        let ids = [gate.id, value.id];
        let (gate, value) = match ids.iter().any(Option::is_some) {
            true => (self.keep(gate)?, self.keep(value)?),
            false => (Reader::of(gate), Reader::of(value)),
        };
        let kept = match self.computes_again(&[&gate, &value]) {
            true => {
                let (gate, value) = (gate.clone(), value.clone());
                Kept::again(move |memos| {
                    activation.apply_pair(&gate.get(memos)?, &value.get(memos)?)
                })
            }
            false => Kept::Tensor(tensor.clone()),
        };
        let own = kept.memo();
        let recast = self.recomputes && own.is_some();
        let y = self.record(Value::Made(tensor), kept, &ids, move |sweep, grad| {
            sweep.memos.forget(own);
            let gate = gate.finish(&mut sweep.memos)?;
            let value = value.finish(&mut sweep.memos)?;
            let [dgate, dvalue] = activation.backward_pair(&gate, &value, &grad.contiguous()?)?;
            sweep.add(ids[0], dgate)?;
            sweep.add(ids[1], dvalue)
        });
        Ok(Wide { recast, ..y })
    }

    /// [`dropout`](crate::ops::dropout()) with this seed.
    ///
    /// # Errors
    /// If `p` is not within `0..1`.
    pub fn dropout(&mut self, x: &Wide, p: f64, seed: u64) -> Result<Wide> {
        let tensor = dropout::dropout(x.value.get()?, p, seed)?;
        let id = x.id;
        Ok(self.record_tensor(tensor, &[id], move |sweep, grad| {
            sweep.add_shared(id, &dropout::dropout(grad, p, seed)?)
        }))
    }
}
