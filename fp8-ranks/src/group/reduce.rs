//! Sums and maxima of tensors.

use super::process_group::ProcessGroup;
use super::rows::{flat, rows, shaped};
use super::started::{Stage, Started, Then};
use crate::engine::{Collective, Pending};
use crate::error::{Operation, Result};
use crate::sum::{ReduceOp, SumOrder, check, combine, even, keys, values};
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// How an `all_reduce` is made from collectives of the engine.
enum Way {
    /// There is one rank.
    Copy,
    /// The engine's own sum, in this dtype.
    EngineSum(DType),
    /// The engine's maximum of u32.
    Integers,
    /// The same, of integers in the order of floats.
    Keys,
    /// Pieces from all ranks, combined at home and gathered.
    Pieces,
}

impl ProcessGroup {
    /// Elementwise sum or maximum over the ranks, on all of them.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective): a dtype without this operation ([`ReduceOp`]), ranks whose tensors differ in size or dtype, and
    /// the errors of [`Started::wait`]. All operations below have these errors.
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
        let shape = tensor.shape().clone();
        let then: Then = Box::new(move |result| Ok(result.to_dtype(dtype)?.reshape(shape)?));
        let cast = |to: DType| {
            let cast = flat.to_dtype(to).map_err(Into::into);
            self.member.checked(operation, cast)
        };
        match self.way(op, dtype) {
            Way::Copy => {
                let counts = vec![flat.elem_count()];
                self.start(operation, Collective::AllGather { own: flat, counts }, then)
            }
            Way::EngineSum(wide) => {
                let own = cast(wide)?;
                self.start(operation, Collective::EngineSum { own }, then)
            }
            Way::Integers => {
                let own = cast(DType::U32)?;
                self.start(operation, Collective::MaxOfBits { own }, then)
            }
            Way::Keys => {
                let own = self.member.checked(operation, keys(&cast(DType::F32)?))?;
                let then: Then = Box::new(|keys| then(values(&keys)?));
                self.start(operation, Collective::MaxOfBits { own }, then)
            }
            Way::Pieces => {
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
        }
    }

    fn way(&self, op: ReduceOp, dtype: DType) -> Way {
        let by_engine = self.member.options.sum_order == SumOrder::Engine;
        match (op, dtype) {
            _ if self.size() == 1 => Way::Copy,
            (ReduceOp::Sum, DType::F32 | DType::F64) if by_engine => Way::EngineSum(dtype),
            (ReduceOp::Sum, DType::BF16 | DType::F16) if by_engine => Way::EngineSum(DType::F32),
            (ReduceOp::Max, DType::U8 | DType::U32) => Way::Integers,
            (ReduceOp::Max, DType::F32 | DType::BF16 | DType::F16) => Way::Keys,
            _ => Way::Pieces,
        }
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
