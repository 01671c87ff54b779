//! Sums and maxima of tensors.

use super::process_group::ProcessGroup;
use super::rows::{flat, rows, shaped};
use super::started::{Stage, Started, Then};
use crate::engine::{Collective, Pending};
use crate::error::{Operation, Result};
use crate::sum::{ReduceOp, SumOrder, check, combine, even, keys, values};
use candle_core::{DType, Tensor};
use std::sync::Arc;

impl ProcessGroup {
    /// Elementwise sum or maximum over the ranks, on all of them.
    ///
    /// # Errors
    /// [`Error::Collective`]: a dtype without this operation ([`ReduceOp`]), ranks whose tensors differ in size or dtype, and
    /// whatever [`Started::wait`] says. So have all operations below.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.start_all_reduce(tensor, op)?.wait()
    }

    /// [`ProcessGroup::all_reduce`] without waiting for its end. The tensor must not change until then.
    ///
    /// # Errors
    /// Those that this rank sees at once.
    pub fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Started> {
        let operation = Operation::AllReduce;
        let dtype = tensor.dtype();
        let flat = self.begin(operation, check(op, dtype).and_then(|()| flat(tensor)))?;
        let narrow = matches!(dtype, DType::BF16 | DType::F16);
        let engines_sum = self.member.options.sum_order == SumOrder::Engine
            && (narrow || matches!(dtype, DType::F32 | DType::F64));
        let shape = tensor.shape().clone();
        let then: Then = match (op, dtype) {
            (ReduceOp::Sum, _) if engines_sum => {
                Box::new(move |sum| Ok(sum.to_dtype(dtype)?.reshape(shape)?))
            }
            (ReduceOp::Max, DType::F32 | DType::BF16 | DType::F16) => {
                Box::new(move |keys| Ok(values(&keys)?.to_dtype(dtype)?.reshape(shape)?))
            }
            _ => Box::new(move |result| Ok(result.to_dtype(dtype)?.reshape(shape)?)),
        };
        // One collective of the engine, if it has one.
        let own = match (op, dtype) {
            (ReduceOp::Sum, _) if engines_sum && narrow => Some(flat.to_dtype(DType::F32)),
            (ReduceOp::Sum, _) if engines_sum => Some(Ok(flat.clone())),
            (ReduceOp::Max, DType::U8 | DType::U32) => Some(flat.to_dtype(DType::U32)),
            (ReduceOp::Max, DType::F32 | DType::BF16 | DType::F16) => {
                Some(flat.to_dtype(DType::F32))
            }
            _ => None,
        };
        let own = own.map(|own| match (op, dtype) {
            (ReduceOp::Max, DType::F32 | DType::BF16 | DType::F16) => keys(&own?),
            _ => Ok(own?),
        });
        if let Some(own) = own {
            let own = self.member.checked(operation, own)?;
            let collective = match op {
                ReduceOp::Sum => Collective::EngineSum { own },
                ReduceOp::Max => Collective::MaxOfBits { own },
            };
            return self.start(operation, collective, then);
        }
        let counts = even(flat.elem_count(), self.size());
        let (pending, combine) = self.exchange(operation, flat, counts.clone(), op)?;
        let stage = Stage::Pieces {
            pending,
            combine,
            counts,
            then,
        };
        Ok(Started::new(Arc::clone(&self.member), operation, stage))
    }

    /// Elementwise sum (in rank order, whatever the group's [`SumOrder`]) or maximum, of which every rank gets its rows:
    /// `counts[rank]`, the first ones for rank 0. All ranks give the same counts.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`], and counts that do not fit the tensor.
    pub fn reduce_scatter(
        &self,
        tensor: &Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Tensor> {
        self.start_reduce_scatter(tensor, counts, op)?.wait()
    }

    /// [`ProcessGroup::reduce_scatter`] without waiting for its end. The tensor must not change until then.
    ///
    /// # Errors
    /// Those that this rank sees at once.
    pub fn start_reduce_scatter(
        &self,
        tensor: &Tensor,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Started> {
        let operation = Operation::ReduceScatter;
        let checked = check(op, tensor.dtype()).and_then(|()| match counts.len() == self.size() {
            true => rows(tensor, counts.iter().sum()),
            false => Err(self.counts(counts)),
        });
        let (pieces, width) = self.begin(operation, checked)?;
        let elements = counts.iter().map(|rows| rows * width).collect();
        let (pending, combine) = self.exchange(operation, pieces, elements, op)?;
        let shaped = shaped(tensor, counts[self.rank()]);
        let then: Then = Box::new(|pieces| shaped(combine(pieces)?));
        let stage = Stage::Last { pending, then };
        Ok(Started::new(Arc::clone(&self.member), operation, stage))
    }

    /// Sends pieces of `counts` elements to the ranks, and says what to make of those that come.
    fn exchange(
        &self,
        operation: Operation,
        pieces: Tensor,
        counts: Vec<usize>,
        op: ReduceOp,
    ) -> Result<(Box<dyn Pending>, Then)> {
        let ranks = self.size();
        let receive = vec![counts[self.rank()]; ranks];
        let collective = Collective::AllToAll {
            pieces,
            most: counts.iter().max().copied(),
            send: counts,
            receive,
        };
        let engine = &*self.member.engine;
        let pending = self.member.start(engine, operation, collective)?;
        let combine: Then = Box::new(move |pieces| combine(&pieces, ranks, op));
        Ok((pending, combine))
    }
}
