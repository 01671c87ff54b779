//! One collective under way, in one call of MPI or in several rounds.

use super::buffer::{Source, Target};
use super::library::{Communicator, Parts, Request, int};
use crate::engine::Collective;
use crate::error::Failure;
use candle_core::{DType, Tensor};

/// Requests, and all memory that MPI uses until they are done.
pub(super) struct Transfer {
    /// Those that are not done, the last first.
    requests: Vec<Request>,
    /// `None` only while it is dropped, or done.
    memory: Option<Memory>,
    /// Bytes that are sent or received.
    bytes: u64,
}

struct Memory {
    source: Option<Source>,
    target: Target,
    /// What is copied to the target at the end.
    rounds: Vec<Round>,
    parts: Vec<Parts>,
    /// Whether the top bits of source and target are flipped: see [`flipped`].
    flipped: bool,
}

/// Data that was cut because MPI counts with 32 bits, as it comes and goes in one call.
struct Round {
    sent: Option<Target>,
    received: Target,
    /// Place in the target and number of elements, for each rank.
    places: Vec<(usize, usize)>,
}

/// MPI may still write to the memory of requests that are not done: then it is never freed. This happens when a process is about
/// to end.
impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            std::mem::forget(self.memory.take());
        }
    }
}

/// U32 with the top bit of each element flipped: as signed integers they have the order that the values have without a sign. MPICH
/// 4.0 takes the maximum of unsigned integers as if they had a sign.
fn flipped(tensor: &Tensor) -> Result<Tensor, Failure> {
    let values = tensor.flatten_all()?.to_vec1::<u32>()?;
    let len = values.len();
    let values: Vec<u32> = values.into_iter().map(|value| value ^ (1 << 31)).collect();
    Ok(Tensor::from_vec(values, len, tensor.device())?)
}

/// Begins of parts that lie one after the other.
fn begins(counts: &[usize]) -> Vec<usize> {
    let sums = counts.iter().scan(0, |sum, count| {
        let begin = *sum;
        *sum += count;
        Some(begin)
    });
    sums.collect()
}

/// Elements of a part with `count` that go in one round.
fn cut(count: usize, round: usize, most: usize) -> usize {
    count.saturating_sub(round * most).min(most)
}

impl Transfer {
    /// Starts it. Tensors are on the CPU. No call has more than `largest` elements from or to all ranks together.
    pub(super) fn start(
        communicator: &Communicator,
        collective: Collective,
        largest: usize,
    ) -> Result<Self, Failure> {
        let len = collective.result_len();
        let dtype = collective.tensor().map_or(DType::U8, Tensor::dtype);
        let given = collective.tensor().map_or(0, Tensor::elem_count);
        let bytes = ((given + len) * dtype.size_in_bytes()) as u64;
        let (source, target) = match &collective {
            Collective::Broadcast { tensor, root } if *root == communicator.rank => {
                (None, Target::copied(tensor)?)
            }
            Collective::Broadcast { .. } | Collective::Barrier => {
                (None, Target::zeros(dtype, len)?)
            }
            Collective::MaxOfBits { own } => {
                (Some(Source::new(flipped(own)?)), Target::zeros(dtype, len)?)
            }
            other => {
                let source = other.tensor().cloned().map(Source::new);
                (source, Target::zeros(dtype, len)?)
            }
        };
        let memory = Memory {
            source,
            target,
            rounds: vec![],
            parts: vec![],
            flipped: matches!(collective, Collective::MaxOfBits { .. }),
        };
        let mut this = Self {
            requests: vec![],
            memory: Some(memory),
            bytes,
        };
        match collective {
            Collective::Barrier => this.requests.push(communicator.barrier()?),
            Collective::Broadcast { root, .. } => {
                this.pieces(len, largest, |memory, at, count| {
                    let data = memory.target.at(at);
                    // SAFETY: elements of the target, which `Transfer` keeps until the request is done and nobody uses before.
                    unsafe { communicator.broadcast(data, count, dtype, root) }
                })?;
            }
            Collective::MaxOfBits { .. } | Collective::EngineSum { .. } => {
                this.pieces(len, largest, |memory, at, count| {
                    let (send, receive) = (memory.sent(at)?, memory.target.at(at));
                    // SAFETY: elements of source and target, which `Transfer` keeps until the request is done; nobody writes
                    // to the source, whose storage is locked, and nobody uses the target before.
                    unsafe { communicator.reduce(send, receive, count, dtype) }
                })?;
            }
            Collective::AllGather { counts, .. } => {
                this.all_gather(communicator, &counts, dtype, largest)?;
            }
            Collective::AllToAll {
                pieces,
                send,
                receive,
                most,
            } => {
                this.all_to_all(communicator, &pieces, (&send, &receive), most, largest)?;
            }
        }
        this.requests.reverse();
        Ok(this)
    }

    /// Bytes that are sent or received.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn memory(&mut self) -> &mut Memory {
        let memory = self.memory.as_mut();
        memory.unwrap_or_else(|| unreachable!("taken at the end only"))
    }

    /// One request for each `largest` elements.
    fn pieces(
        &mut self,
        len: usize,
        largest: usize,
        start: impl Fn(&mut Memory, usize, i32) -> Result<Request, Failure>,
    ) -> Result<(), Failure> {
        // One even without elements: then all ranks have come.
        for at in (0..len.max(1)).step_by(largest) {
            let count = int((len - at).min(largest))?;
            let request = start(self.memory(), at, count)?;
            self.requests.push(request);
        }
        Ok(())
    }

    fn all_gather(
        &mut self,
        communicator: &Communicator,
        counts: &[usize],
        dtype: DType,
        largest: usize,
    ) -> Result<(), Failure> {
        let rank = communicator.rank;
        let whole = counts.iter().sum::<usize>() <= largest;
        let most = match whole {
            true => largest,
            false => (largest / counts.len()).max(1),
        };
        let rounds = counts
            .iter()
            .max()
            .map_or(1, |count| count.div_ceil(most))
            .max(1);
        for round in 0..rounds {
            let cuts: Vec<_> = counts
                .iter()
                .map(|count| cut(*count, round, most))
                .collect();
            let count = int(cuts[rank])?;
            let parts = Parts::new(cuts.iter().copied())?;
            let memory = self.memory();
            let send = memory.sent((round * most).min(counts[rank]))?;
            let receive = match whole {
                true => memory.target.at(0),
                false => memory.round(None, dtype, counts, cuts, round * most)?,
            };
            // SAFETY: `cuts[rank]` elements of the source from the place where the round begins; the target or the round's own
            // memory has room for all cuts. `Transfer` keeps all until the request is done; the source's storage is locked, and
            // nobody uses what is received before.
            let request = unsafe { communicator.all_gather(send, count, receive, &parts, dtype)? };
            memory.parts.push(parts);
            self.requests.push(request);
        }
        Ok(())
    }

    fn all_to_all(
        &mut self,
        communicator: &Communicator,
        pieces: &Tensor,
        (send, receive): (&[usize], &[usize]),
        most: Option<usize>,
        largest: usize,
    ) -> Result<(), Failure> {
        let dtype = pieces.dtype();
        let ranks = send.len();
        // All ranks must cut alike, so only if all know how long the longest piece is.
        let Some(longest) = most.filter(|most| most.saturating_mul(ranks) > largest) else {
            let (sent, received) = (
                Parts::new(send.iter().copied())?,
                Parts::new(receive.iter().copied())?,
            );
            let memory = self.memory();
            let (from, to) = (memory.sent(0)?, memory.target.at(0));
            // SAFETY: all elements of source and target, which `Transfer` keeps until the request is done; the source's storage is
            // locked, and nobody uses the target before.
            let request = unsafe { communicator.all_to_all(from, &sent, to, &received, dtype)? };
            memory.parts.extend([sent, received]);
            self.requests.push(request);
            return Ok(());
        };
        let most = (largest / ranks).max(1);
        let pieces = Target::copied(pieces)?;
        let begins = begins(send);
        for round in 0..longest.div_ceil(most) {
            let cuts = |counts: &[usize]| -> Vec<_> {
                counts
                    .iter()
                    .map(|count| cut(*count, round, most))
                    .collect()
            };
            let (send_cuts, receive_cuts) = (cuts(send), cuts(receive));
            let mut staged = Target::zeros(dtype, send_cuts.iter().sum())?;
            let mut at = 0;
            for (begin, count) in begins.iter().zip(&send_cuts) {
                if *count > 0 {
                    staged.copy(at, &pieces, begin + round * most, *count);
                }
                at += count;
            }
            let sent = Parts::new(send_cuts)?;
            let received = Parts::new(receive_cuts.iter().copied())?;
            let memory = self.memory();
            let from = staged.at(0).cast_const();
            let to = memory.round(Some(staged), dtype, receive, receive_cuts, round * most)?;
            // SAFETY: both are the round's own memory (moving `staged` into it does not move its elements), with the elements
            // that the parts name; `Transfer` keeps it until the request is done.
            let request = unsafe { communicator.all_to_all(from, &sent, to, &received, dtype)? };
            memory.parts.extend([sent, received]);
            self.requests.push(request);
        }
        Ok(())
    }

    /// The result, if all requests are done. Lets MPI make progress.
    pub(super) fn poll(&mut self) -> Result<Option<Tensor>, Failure> {
        while let Some(request) = self.requests.last_mut() {
            if !request.test()? {
                return Ok(None);
            }
            self.requests.pop();
        }
        let Some(Memory {
            mut target,
            rounds,
            flipped: flips,
            ..
        }) = self.memory.take()
        else {
            unreachable!("polled after the end");
        };
        for round in rounds {
            let mut begin = 0;
            for (at, len) in round.places {
                if len > 0 {
                    target.copy(at, &round.received, begin, len);
                }
                begin += len;
            }
            drop(round.sent);
        }
        let result = target.into_tensor()?;
        match flips {
            true => flipped(&result).map(Some),
            false => Ok(Some(result)),
        }
    }
}

impl Memory {
    /// The address of an element that this rank gives.
    fn sent(&self, at: usize) -> Result<*const std::ffi::c_void, Failure> {
        let source = self.source.as_ref();
        let source = source.unwrap_or_else(|| unreachable!("this collective has a source"));
        source.at(at)
    }

    /// Memory for the parts of one round, of which `cuts` elements belong after `done` elements of each rank's `counts`.
    fn round(
        &mut self,
        sent: Option<Target>,
        dtype: DType,
        counts: &[usize],
        cuts: Vec<usize>,
        done: usize,
    ) -> Result<*mut std::ffi::c_void, Failure> {
        let mut received = Target::zeros(dtype, cuts.iter().sum())?;
        let pointer = received.at(0);
        let places = begins(counts).into_iter().zip(cuts);
        self.rounds.push(Round {
            sent,
            received,
            places: places.map(|(begin, count)| (begin + done, count)).collect(),
        });
        Ok(pointer)
    }
}
