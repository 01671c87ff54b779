//! One collective of all ranks of a group: whether the calls match, and their results.

use crate::engine::{Call, Collective};
use crate::error::Failure;
use candle_core::{DType, Device, Tensor};

/// The contribution of a rank.
#[derive(Debug)]
pub(super) enum Given {
    Call(Call),
    Split { color: Option<usize>, key: usize },
}

impl Given {
    pub(super) fn described(&self, rank: usize) -> String {
        match self {
            Self::Call(call) => format!("rank {rank} calls {}", call.described()),
            Self::Split { .. } => format!("rank {rank} calls split"),
        }
    }
}

/// Its outcome.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The result of each rank.
    Tensors(Vec<Tensor>),
    /// The members of new groups, in the order of their ranks there.
    Groups(Vec<Vec<usize>>),
}

/// # Errors
/// [`Failure::Mismatch`], or a failed copy.
pub(super) fn complete(given: &[Given]) -> Result<Outcome, Failure> {
    let mismatch = || {
        let calls = given.iter().enumerate();
        let calls = calls.map(|(rank, given)| given.described(rank));
        Failure::Mismatch {
            calls: calls.collect(),
        }
    };
    let mut calls = vec![];
    let mut splits = vec![];
    for (rank, given) in given.iter().enumerate() {
        match given {
            Given::Call(call) => calls.push(call),
            Given::Split { color, key } => splits.push((*color, *key, rank)),
        }
    }
    if splits.len() == given.len() {
        return Ok(Outcome::Groups(groups(splits)));
    }
    let fits = splits.is_empty()
        && calls.iter().all(|call| {
            let same = call.operation == calls[0].operation && call.group == calls[0].group;
            same && fit(&calls[0].collective, &call.collective)
        })
        && pairs_fit(&calls);
    if !fits {
        return Err(mismatch());
    }
    let results = (0..calls.len()).map(|rank| result(&calls, rank));
    Ok(Outcome::Tensors(results.collect::<Result<_, _>>()?))
}

fn groups(mut splits: Vec<(Option<usize>, usize, usize)>) -> Vec<Vec<usize>> {
    splits.sort();
    splits.retain(|(color, ..)| color.is_some());
    let groups = splits.chunk_by(|one, other| one.0 == other.0);
    let ranks = |group: &[(_, _, usize)]| group.iter().map(|(.., rank)| *rank).collect();
    groups.map(ranks).collect()
}

/// Whether a rank's collective is that of rank 0.
fn fit(first: &Collective, other: &Collective) -> bool {
    use Collective::{AllGather, AllToAll, Barrier, Broadcast, EngineSum, MaxOfBits};
    let alike = |a: &Tensor, b: &Tensor| a.dtype() == b.dtype() && a.dims() == b.dims();
    match (first, other) {
        (AllGather { own: a, counts }, AllGather { own: b, counts: c }) => {
            a.dtype() == b.dtype() && counts == c
        }
        (AllToAll { pieces: a, .. }, AllToAll { pieces: b, .. }) => a.dtype() == b.dtype(),
        (Broadcast { tensor: a, root }, Broadcast { tensor: b, root: c }) => {
            alike(a, b) && root == c
        }
        (MaxOfBits { own: a }, MaxOfBits { own: b }) => alike(a, b),
        (EngineSum { own: a }, EngineSum { own: b }) => alike(a, b),
        (Barrier, Barrier) => true,
        _ => false,
    }
}

/// Whether each rank expects from each other what that one sends.
fn pairs_fit(calls: &[&Call]) -> bool {
    let counts = calls.iter().filter_map(|call| match &call.collective {
        Collective::AllToAll { send, receive, .. } => Some((send, receive)),
        _ => None,
    });
    let counts: Vec<_> = counts.collect();
    (0..counts.len()).all(|from| {
        let mut to = 0..counts.len();
        to.all(|to| counts[from].0[to] == counts[to].1[from])
    })
}

fn result(calls: &[&Call], rank: usize) -> Result<Tensor, Failure> {
    let device = calls[rank].collective.tensor().map(Tensor::device);
    let device = device.unwrap_or(&Device::Cpu);
    let tensor = |from: usize| {
        let tensor = calls[from].collective.tensor();
        tensor.unwrap_or_else(|| unreachable!("only a barrier has none"))
    };
    let ranks = 0..calls.len();
    Ok(match &calls[rank].collective {
        Collective::AllGather { .. } => joined(ranks.map(|from| tensor(from).to_device(device)))?,
        Collective::AllToAll { .. } => joined(calls.iter().map(|from| match &from.collective {
            Collective::AllToAll { pieces, send, .. } => {
                let begin = send[..rank].iter().sum();
                pieces.narrow(0, begin, send[rank])?.to_device(device)
            }
            _ => unreachable!("all calls are alike"),
        }))?,
        Collective::Broadcast { root, .. } => tensor(*root).to_device(device)?.copy()?,
        Collective::MaxOfBits { own } => {
            let mut most = own.to_vec1::<u32>()?;
            for other in ranks {
                let other = tensor(other).to_vec1::<u32>()?;
                most.iter_mut()
                    .zip(other)
                    .for_each(|(a, b)| *a = (*a).max(b));
            }
            Tensor::new(most, device)?
        }
        Collective::EngineSum { .. } => {
            let first = tensor(0).to_device(device)?.copy()?;
            let mut others = ranks.skip(1);
            others.try_fold(first, |sum, other| sum + tensor(other).to_device(device)?)?
        }
        Collective::Barrier => Tensor::zeros(0, DType::U8, device)?,
    })
}

/// Tensors one after the other, in memory of their own.
fn joined(parts: impl Iterator<Item = candle_core::Result<Tensor>>) -> candle_core::Result<Tensor> {
    let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
    // `cat` of one tensor is that tensor.
    match &parts[..] {
        [one] => one.force_contiguous()?.copy(),
        parts => Tensor::cat(parts, 0),
    }
}
