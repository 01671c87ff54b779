//! What an engine does: a few collectives over flat tensors, started without waiting.

use crate::error::{Error, Failure, Operation};
use candle_core::{DType, Tensor};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A library that connects ranks, as one of its groups sees it.
///
/// [`crate::ProcessGroup`] makes all of its operations from these few. Ranks must make the same calls in the same order.
pub trait Engine: Debug + Send + Sync {
    /// The library: "threads", "MPI", ..
    fn name(&self) -> &'static str;

    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Starts a collective and returns at once. [`Call::check`] has passed.
    ///
    /// # Errors
    /// The library refused it.
    fn start(&self, call: Call) -> Result<Box<dyn Pending>, Failure>;

    /// A group of the ranks that give the same color, in the order of their keys (then of their ranks), or none for a rank
    /// without a color. All ranks call it.
    ///
    /// # Errors
    /// The library refused it, or the others did not come within `deadline`.
    fn split(
        &self,
        group: &Arc<str>,
        color: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Arc<dyn Engine>>, Failure>;

    /// The end of the engine, which all ranks call; nothing is called after it. Returns when all have come. An engine of one rank has
    /// nothing to do.
    ///
    /// # Errors
    /// The library refused it, or the others did not come within `deadline`. [`Failure::Mismatch`], as far as the engine can tell, if
    /// a rank waits in a collective for one that has come to its end.
    fn finish(&self, deadline: Duration) -> Result<(), Failure> {
        let _ = deadline;
        Ok(())
    }

    /// This rank cannot continue. Lets the others know at once; an engine of processes does not return.
    fn give_up(&self, error: &Error);
}

/// A collective under way.
pub trait Pending: Debug + Send {
    /// The result, in its own memory on the device of the argument: flat, and empty for a barrier.
    ///
    /// # Errors
    /// It failed, or was not done within `deadline` from now.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Tensor, Failure>;
}

/// A collective with what messages and checks need to know about it.
#[derive(Debug, Clone)]
pub struct Call {
    /// What the user called.
    pub operation: Operation,
    /// Name of the group.
    pub group: Arc<str>,
    /// What the engine should do.
    pub collective: Collective,
}

/// A collective over contiguous tensors of one dimension, with counts in elements. The tensor must not be written to
/// (`Var::set`) between start and end.
#[derive(Debug, Clone)]
pub enum Collective {
    /// The `own` of all ranks, one after the other.
    AllGather {
        /// `[counts[rank]]`.
        own: Tensor,
        /// Elements of each rank, the same on all.
        counts: Vec<usize>,
    },
    /// The pieces that all ranks have for this one, in the order of ranks.
    AllToAll {
        /// `[sum of send]`: a piece for each rank.
        pieces: Tensor,
        /// Elements for each rank.
        send: Vec<usize>,
        /// Elements from each rank.
        receive: Vec<usize>,
        /// The most elements from one rank to another, if all ranks know it. An engine whose calls have a limit then cuts data
        /// that are longer.
        most: Option<usize>,
    },
    /// The root's tensor. The other ranks give one of the same shape and dtype.
    Broadcast {
        /// The data, on the root.
        tensor: Tensor,
        /// Whose data.
        root: usize,
    },
    /// Elementwise maximum of u32.
    MaxOfBits {
        /// U32, as long as the others'.
        own: Tensor,
    },
    /// Elementwise sum in the order that the engine likes.
    EngineSum {
        /// F32 or F64, as long as the others'.
        own: Tensor,
    },
    /// Ends when all ranks have started it.
    Barrier,
}

impl Collective {
    /// The tensor that this rank gives.
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::AllGather { own: tensor, .. }
            | Self::AllToAll { pieces: tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::MaxOfBits { own: tensor }
            | Self::EngineSum { own: tensor } => Some(tensor),
            Self::Barrier => None,
        }
    }

    /// The same with another tensor.
    pub fn with_tensor(mut self, new: Tensor) -> Self {
        match &mut self {
            Self::AllGather { own: tensor, .. }
            | Self::AllToAll { pieces: tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::MaxOfBits { own: tensor }
            | Self::EngineSum { own: tensor } => *tensor = new,
            Self::Barrier => (),
        }
        self
    }

    /// Elements of the result.
    pub fn result_len(&self) -> usize {
        match self {
            Self::AllGather { counts, .. } => counts.iter().sum(),
            Self::AllToAll { receive, .. } => receive.iter().sum(),
            _ => self.tensor().map_or(0, Tensor::elem_count),
        }
    }
}

impl Call {
    /// What this rank can check alone.
    ///
    /// # Errors
    /// Counts that do not fit the ranks or the tensor, a root that does not exist, a dtype that the collective does not take.
    pub fn check(&self, rank: usize, ranks: usize) -> Result<(), Failure> {
        let per_rank = |counts: &[usize]| match counts.len() == ranks {
            true => Ok(()),
            false => Err(Failure::Counts {
                got: counts.len(),
                ranks,
            }),
        };
        let len = |tensor: &Tensor, expected: usize| match tensor.dims() == [expected] {
            true => Ok(()),
            false => Err(Failure::Rows {
                shape: tensor.dims().to_vec(),
                got: tensor.elem_count(),
                expected,
            }),
        };
        let dtype = |tensor: &Tensor, dtypes: &[DType], expected| match tensor.dtype() {
            got if dtypes.contains(&got) => Ok(()),
            got => Err(Failure::DType { got, expected }),
        };
        match &self.collective {
            Collective::AllGather { own, counts } => {
                per_rank(counts)?;
                len(own, counts[rank])
            }
            Collective::AllToAll {
                pieces,
                send,
                receive,
                ..
            } => {
                per_rank(send)?;
                per_rank(receive)?;
                len(pieces, send.iter().sum())
            }
            Collective::Broadcast { root, .. } if *root >= ranks => {
                Err(Failure::Root { root: *root, ranks })
            }
            Collective::Broadcast { tensor, .. } => len(tensor, tensor.elem_count()),
            Collective::MaxOfBits { own } => {
                dtype(own, &[DType::U32], "U32")?;
                len(own, own.elem_count())
            }
            Collective::EngineSum { own } => {
                dtype(own, &[DType::F32, DType::F64], "F32 or F64")?;
                len(own, own.elem_count())
            }
            Collective::Barrier => Ok(()),
        }
    }

    /// For messages: `all_gather of group "world" with 12 F32 of [12, 12]`.
    pub fn described(&self) -> String {
        let Self {
            operation, group, ..
        } = self;
        let tensor = self.collective.tensor().map_or_else(String::new, |tensor| {
            format!(" with {} {:?}", tensor.elem_count(), tensor.dtype())
        });
        let more = match &self.collective {
            Collective::AllGather { counts, .. } => format!(" of {counts:?}"),
            Collective::AllToAll { send, receive, .. } => {
                format!(" (sends {send:?}, expects {receive:?})")
            }
            Collective::Broadcast { root, .. } => format!(" from {root}"),
            _ => String::new(),
        };
        format!("{operation} of group {group:?}{tensor}{more}")
    }
}
