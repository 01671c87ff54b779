//! A group as what delayed scaling asks for.

use super::process_group::ProcessGroup;
use crate::engine::Collective;
use crate::error::{Failure, Operation};
use crate::sum::{amax_bits, amaxes as from_bits};
use candle_core::{DType, Tensor};
use fp8_candle::state::ReductionGroup;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

impl ReductionGroup for ProcessGroup {
    fn ranks(&self) -> usize {
        self.size()
    }

    fn rank(&self) -> Option<usize> {
        Some(ProcessGroup::rank(self))
    }

    fn identity(&self) -> usize {
        Arc::as_ptr(&self.member).addr()
    }

    fn steps(&self) -> Option<&AtomicU64> {
        Some(&self.member.steps)
    }

    /// Amaxes travel as the bits of f32 without a sign, whose order as integers is theirs: a NaN on one rank is a NaN on all,
    /// on every engine. They have a communicator of their own.
    fn all_reduce_max(&self, amaxes: &Tensor) -> fp8_candle::Result<Tensor> {
        let operation = Operation::AllReduceMax;
        let member = &self.member;
        member.counters.call(operation);
        let bits = match amaxes.dtype() {
            DType::F32 => amaxes.flatten_all().map_err(Failure::from),
            got => Err(Failure::DType {
                got,
                expected: "F32",
            }),
        };
        let own = member.checked(operation, bits.and_then(|amaxes| amax_bits(&amaxes)))?;
        let engine = &*member.amaxes;
        let bits = member.run(engine, operation, Collective::MaxOfBits { own })?;
        let shaped = from_bits(&bits).and_then(|flat| Ok(flat.reshape(amaxes.shape())?));
        Ok(member.checked(operation, shaped)?)
    }
}
