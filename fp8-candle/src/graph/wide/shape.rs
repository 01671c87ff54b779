//! Views within a wide node.

use super::kept::Kept;
use super::value::Value;
use super::{Wide, WideNode};
use crate::base::error::{Result, shape_error};
use candle_core::Tensor;

impl WideNode {
    /// The same values, in the same order, in other dimensions.
    ///
    /// # Errors
    /// If `dims` has another number of elements.
    pub fn reshape(&mut self, x: &Wide, dims: &[usize]) -> Result<Wide> {
        let tensor = x.value.get()?.reshape(dims)?;
        let (id, before, to) = (x.id, x.dims().to_vec(), dims.to_vec());
        let kept = match &x.kept {
            Kept::Tensor(_) | Kept::Value(_) => Kept::Tensor(tensor.clone()),
            Kept::Argument(_) => Kept::Argument(tensor.clone()),
            again => {
                let again = again.clone();
                Kept::again(move |memos| Ok(again.get(memos)?.reshape(to.as_slice())?))
            }
        };
        let y = self.record(Value::Made(tensor), kept, &[id], move |sweep, grad| {
            // The caller's gradient is not used again, so a view of it will do.
            sweep.add_shared(id, &grad.reshape(before.as_slice())?)
        });
        let (recast, codes) = (x.recast, x.codes.clone());
        Ok(Wide { recast, codes, ..y })
    }

    /// Parts of the last dimension, one after the other, each contiguous.
    ///
    /// # Errors
    /// If `sizes` do not add up to it.
    pub fn split(&mut self, x: &Wide, sizes: &[usize]) -> Result<Vec<Wide>> {
        let last = x.dims().last().copied().unwrap_or(0);
        if sizes.iter().sum::<usize>() != last {
            return Err(shape_error(
                "split",
                "x",
                format!("a last dimension of {sizes:?} parts"),
                x.dims(),
            ));
        }
        let dim = x.dims().len() - 1;
        let whole = x.value.get()?;
        let mut parts = vec![];
        let mut start = 0;
        for &size in sizes {
            let tensor = whole.narrow(dim, start, size)?.contiguous()?;
            start += size;
            let id = x.id.map(|_| self.new_value());
            parts.push(Wide::held(tensor, id));
        }
        let Some(id) = x.id else {
            return Ok(parts);
        };
        let outputs = parts.iter().filter_map(|part| part.id).collect();
        let like: Vec<Vec<usize>> = parts.iter().map(|part| part.dims().to_vec()).collect();
        let (dtype, device) = (whole.dtype(), whole.device().clone());
        let backward = move |sweep: &mut super::Sweep, grads: Vec<Option<Tensor>>| {
            let grads = grads.into_iter().zip(&like).map(|(grad, dims)| match grad {
                Some(grad) => Ok(grad),
                None => Tensor::zeros(dims.as_slice(), dtype, &device),
            });
            let grads = grads.collect::<candle_core::Result<Vec<_>>>()?;
            match &grads[..] {
                // candle gives it back as it is.
                [grad] => sweep.add_shared(Some(id), grad),
                grads => sweep.add(Some(id), Tensor::cat(grads, dim)?),
            }
        };
        self.steps.push(super::Step {
            outputs,
            backward: super::Backward::Many(Box::new(backward)),
        });
        Ok(parts)
    }
}
