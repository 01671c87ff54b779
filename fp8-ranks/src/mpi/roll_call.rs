//! Ranks that wait tell each other where they are, so that one at its end notices another that waits for it in vain.
//!
//! MPI compares nothing, and comparing every call would cost a collective more for each. So ranks speak only when they are stuck: a rank
//! that has waited for [`LONG`], and one at its end, joins a gathering on a communicator that nothing else uses. It is done when all
//! ranks have joined. One that computes or writes a file joins when it waits next; until then the others need not know.

use super::library::Communicator;
use super::numbered::{Numbered, Place};
use super::transfer::Transfer;
use crate::engine::Collective;
use crate::error::{Failure, Operation};
use candle_core::{Device, Tensor};
use std::time::{Duration, Instant};

/// A rank joins a roll call after waiting this long, and no more often than this.
pub(super) const LONG: Duration = Duration::from_millis(500);

/// Words of I64 for a place.
const WORDS: usize = 3;

/// The gatherings, one after the other.
pub(super) struct RollCall {
    communicator: Communicator,
    under_way: Option<Transfer>,
    joined: Instant,
}

impl RollCall {
    /// On a communicator of all ranks of its own.
    pub(super) fn new(communicator: Communicator) -> Self {
        Self {
            communicator,
            under_way: None,
            joined: Instant::now(),
        }
    }

    /// Joins the next gathering, if this rank is in none.
    pub(super) fn join(&mut self, place: Place) -> Result<(), Failure> {
        if self.under_way.is_none() {
            let own = Tensor::from_slice(&words(place), WORDS, &Device::Cpu)?;
            let counts = vec![WORDS; self.communicator.size];
            let gather = Collective::AllGather { own, counts };
            let most = i32::MAX as usize;
            self.under_way = Some(Transfer::start(&self.communicator, gather, most)?);
            self.joined = Instant::now();
        }
        Ok(())
    }

    /// Where each rank was when it joined, once all have.
    pub(super) fn poll(&mut self) -> Result<Option<Vec<Place>>, Failure> {
        let Some(transfer) = &mut self.under_way else {
            return Ok(None);
        };
        let Some(all) = transfer.poll()? else {
            return Ok(None);
        };
        self.under_way = None;
        let all = all.to_vec1::<i64>()?;
        let (places, _) = all.as_chunks::<WORDS>();
        Ok(Some(places.iter().map(place).collect()))
    }

    /// What a rank does from time to time that has waited for long. It leaves the answers to those at their end.
    pub(super) fn attend(&mut self, place: Place) -> Result<(), Failure> {
        if self.joined.elapsed() >= LONG {
            self.join(place)?;
        }
        self.poll().map(drop)
    }
}

fn words(place: Place) -> [i64; WORDS] {
    let operation = place.operation.map_or(-1, |operation| operation as i64);
    [operation, place.communicator as i64, place.number as i64]
}

fn place(words: &[i64; WORDS]) -> Place {
    let mut operations = Operation::ALL
        .into_iter()
        .chain([Operation::Split, Operation::Finish]);
    Place {
        operation: operations.find(|operation| *operation as i64 == words[0]),
        communicator: words[1] as u64,
        number: words[2] as u64,
    }
}

/// For a rank at its end, with its communicators (that of all ranks first): a rank which waits in a collective that this one has not
/// started, or which has come to its end after more or fewer collectives of all ranks. A place may be from long ago, but it was true then,
/// and a rank at its end starts nothing more.
pub(super) fn disagreement(places: &[Place], own: &[Numbered]) -> Option<Failure> {
    let this = own.first()?.communicator.rank;
    let (rank, place, own) = places.iter().enumerate().find_map(|(rank, place)| {
        let own = own.iter().find(|own| own.id == place.communicator)?;
        let differs = match place.is_end() {
            true => own.started != place.number,
            false => own.started < place.number,
        };
        differs.then_some((rank, place, own))
    })?;
    let name = &own.name;
    let end = |rank: usize, number: u64| {
        format!("rank {rank} calls finish after {number} collectives of group {name:?}")
    };
    let mut calls = match place.is_end() {
        true => [
            (rank, end(rank, place.number)),
            (this, end(this, own.started)),
        ],
        false => {
            let operation = place.operation.map_or("something else", Operation::name);
            let call = format!("rank {rank} calls {operation} of group {name:?}");
            [(rank, call), (this, format!("rank {this} calls finish"))]
        }
    };
    calls.sort();
    Some(Failure::Mismatch {
        calls: calls.map(|(_, call)| call).into(),
    })
}
