//! Rows and bytes to other ranks.

use super::process_group::ProcessGroup;
use super::rows::{flat, rows, shaped};
use super::started::{Started, Then};
use crate::engine::Collective;
use crate::error::{Failure, Operation, Result};
use candle_core::{DType, Device, Tensor};

impl ProcessGroup {
    /// The rows of all ranks in their order, on all of them. `counts`: the rows of each rank, which may be 0; all ranks give the
    /// same.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`], and counts that do not fit the tensor.
    pub fn all_gather(&self, tensor: &Tensor, counts: &[usize]) -> Result<Tensor> {
        self.start_all_gather(tensor, counts)?.wait()
    }

    /// [`ProcessGroup::all_gather`] without waiting for its end. The tensor must not change until then.
    ///
    /// # Errors
    /// Those that this rank sees at once.
    pub fn start_all_gather(&self, tensor: &Tensor, counts: &[usize]) -> Result<Started> {
        let operation = Operation::AllGather;
        let expected = counts.get(self.rank()).copied();
        let expected = expected.ok_or_else(|| self.counts(counts));
        let rows = expected.and_then(|expected| rows(tensor, expected));
        let (own, width) = self.begin(operation, rows)?;
        let then = shaped(tensor, counts.iter().sum());
        let counts = counts.iter().map(|rows| rows * width).collect();
        self.start(operation, Collective::AllGather { own, counts }, then)
    }

    /// Rows to every rank, and rows from every rank in their order. `send[r]` rows go to rank r (the first ones to rank 0),
    /// `receive[r]` come from it.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`], and counts that do not fit the tensor or those of other ranks.
    pub fn all_to_all(&self, tensor: &Tensor, send: &[usize], receive: &[usize]) -> Result<Tensor> {
        let operation = Operation::AllToAll;
        let (pieces, width) = self.begin(operation, rows(tensor, send.iter().sum()))?;
        let elements = |rows: &[usize]| rows.iter().map(|rows| rows * width).collect();
        let collective = Collective::AllToAll {
            pieces,
            send: elements(send),
            receive: elements(receive),
            // Only these two ranks know.
            most: None,
        };
        let then = shaped(tensor, receive.iter().sum());
        self.start(operation, collective, then)?.wait()
    }

    /// The root's tensor on all ranks. The others give one of the same shape and dtype, whose values do not matter.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`], and a root that does not exist.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Tensor> {
        let operation = Operation::Broadcast;
        let flat = self.begin(operation, flat(tensor))?;
        let shape = tensor.shape().clone();
        let then: Then = Box::new(move |tensor| Ok(tensor.reshape(shape)?));
        let collective = Collective::Broadcast { tensor: flat, root };
        self.start(operation, collective, then)?.wait()
    }

    /// The root's bytes on all ranks, of any length. Only the root's `bytes` are looked at.
    ///
    /// # Errors
    /// As [`ProcessGroup::broadcast`], and a root that gives `None`.
    pub fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>> {
        let operation = Operation::Broadcast;
        let own = match (self.rank() == root, bytes) {
            (true, None) => Err(Failure::NoData { root }),
            (true, Some(bytes)) => Ok(bytes),
            (false, _) => Ok(&[][..]),
        };
        let own = self.begin(operation, own)?;
        // The length first, as two halves: there is no tensor of u64.
        let len = own.len() as u64;
        let halves = Tensor::new(&[(len >> 32) as u32, len as u32], &Device::Cpu);
        let halves = self.send(halves, root)?.to_vec1::<u32>();
        let halves = self.member.checked(operation, halves.map_err(Into::into))?;
        let len = (u64::from(halves[0]) << 32 | u64::from(halves[1])) as usize;
        let data = match self.rank() == root {
            true => Tensor::from_slice(own, len, &Device::Cpu),
            false => Tensor::zeros(len, DType::U8, &Device::Cpu),
        };
        let data = self.send(data, root)?.to_vec1::<u8>();
        self.member.checked(operation, data.map_err(Into::into))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        let operation = Operation::Barrier;
        self.member.counters.call(operation);
        let engine = &*self.member.engine;
        self.member.run(engine, operation, Collective::Barrier)?;
        Ok(())
    }

    fn send(&self, tensor: candle_core::Result<Tensor>, root: usize) -> Result<Tensor> {
        let operation = Operation::Broadcast;
        let tensor = self.member.checked(operation, tensor.map_err(Into::into))?;
        let collective = Collective::Broadcast { tensor, root };
        self.member.run(&*self.member.engine, operation, collective)
    }
}
