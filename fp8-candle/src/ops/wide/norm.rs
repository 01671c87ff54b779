//! Norms of a wide node.

use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Quantized;
use crate::cast::weight_version::Seen;
use crate::graph::wide::codes::Codes;
use crate::graph::wide::kept::Kept;
use crate::graph::wide::value::{RowSource, Value};
use crate::graph::wide::{Wide, WideNode};
use crate::ops::norm::Norm;
use crate::ops::wide::elementwise::cast_and_fill;
use candle_core::Tensor;
use std::sync::Arc;

/// The result of a norm.
struct Normed {
    norm: Norm,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    /// The codes of `x`, if this is where they are made.
    codes: Option<Arc<Codes>>,
}

impl RowSource for Normed {
    fn make(&self) -> Result<Tensor> {
        if let Some(codes) = &self.codes {
            codes.get()?;
        }
        self.norm
            .detached(&self.x, &self.weight, self.bias.as_ref())
    }

    fn cast(&self, quantizer: &Quantizer, both: bool) -> Result<Option<Quantized>> {
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        cast_and_fill(self.codes.as_deref(), |keep| {
            self.norm
                .cast_rows(&self.x, weight, bias, (quantizer, both), keep)
        })
    }
}

/// What the parameters were in the forward pass: the backward pass reads them again.
struct Parameters {
    op: &'static str,
    weight: Seen,
    bias: Option<Seen>,
}

impl Parameters {
    fn check(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        self.weight.check(weight, self.op, "weight")?;
        match (&self.bias, bias) {
            (Some(seen), Some(bias)) => seen.check(bias, self.op, "bias"),
            _ => Ok(()),
        }
    }
}

impl WideNode {
    /// [`layer_norm`](crate::ops::layer_norm) over the last dimension. The backward pass keeps `x` alone: results and
    /// statistics are computed again.
    ///
    /// # Errors
    /// As [`layer_norm`](crate::ops::layer_norm).
    pub fn layer_norm(
        &mut self,
        x: &Wide,
        weight: &Tensor,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Wide> {
        self.norm(Norm { center: true, eps }, x, weight, bias)
    }

    /// [`rms_norm`](crate::ops::rms_norm) over the last dimension.
    ///
    /// # Errors
    /// As [`rms_norm`](crate::ops::rms_norm).
    pub fn rms_norm(&mut self, x: &Wide, weight: &Tensor, eps: f64) -> Result<Wide> {
        self.norm(Norm { center: false, eps }, x, weight, None)
    }

    fn norm(
        &mut self,
        norm: Norm,
        x: &Wide,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Wide> {
        let ids = [
            x.id,
            self.leaf(weight),
            bias.and_then(|bias| self.leaf(bias)),
        ];
        let input = x.value.get()?;
        let parameters = match ids.iter().any(Option::is_some) {
            true => Some(Parameters {
                op: norm.op(),
                weight: Seen::of(weight)?,
                bias: bias.map(Seen::of).transpose()?,
            }),
            false => None,
        };
        let parameters = Arc::new(parameters);
        let (weight, bias) = (weight.detach(), bias.map(Tensor::detach));
        let casts_rows = norm.casts_rows(input, &weight, bias.as_ref())?;
        let is_read = ids.iter().any(Option::is_some);
        let (reader, codes) = self.keep_for(x, is_read, casts_rows)?;
        let value = match casts_rows {
            false => Value::Made(norm.detached(input, &weight, bias.as_ref())?),
            true => {
                let source = Normed {
                    norm,
                    x: input.clone(),
                    weight: weight.clone(),
                    bias: bias.clone(),
                    codes,
                };
                Value::later(input.dims(), input.dtype(), input.device(), source)
            }
        };
        let kept = {
            let (x, weight, bias) = (reader.clone(), weight.clone(), bias.clone());
            let parameters = parameters.clone();
            Kept::again(move |memos| {
                let y = norm.detached(&x.get(memos)?, &weight, bias.as_ref())?;
                if let Some(parameters) = &*parameters {
                    parameters.check(&weight, bias.as_ref())?;
                }
                Ok(y)
            })
        };
        let own = kept.memo();
        let y = self.record(value, kept, &ids, move |sweep, grad| {
            sweep.memos.forget(own);
            let x = reader.finish(&mut sweep.memos)?;
            let grad = grad.contiguous()?;
            let [dx, dw, db] = norm.backward(&x, &weight, &grad, 1.)?;
            if let Some(parameters) = &*parameters {
                parameters.check(&weight, None)?;
            }
            sweep.add(ids[0], dx)?;
            sweep.add(ids[1], dw)?;
            sweep.add(ids[2], db)
        });
        let recast = self.recomputes;
        Ok(Wide { recast, ..y })
    }
}
