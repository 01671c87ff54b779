//! Where the threads of a job meet.

use super::round::{Given, Outcome, complete};
use crate::error::Failure;
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// All groups of a job.
#[derive(Debug, Default)]
pub(super) struct Hub {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<Group>,
    /// The first failure of any rank, which ends the job for all.
    broken: Option<Failure>,
    /// Ranks of the job whose threads have ended, or which have dropped their groups.
    left: Vec<usize>,
    /// Ranks of the job that have come to their end, and start nothing more.
    finishing: Vec<usize>,
}

#[derive(Debug)]
struct Group {
    /// Ranks of the job, in the order of their ranks here.
    members: Vec<usize>,
    rounds: HashMap<u64, Round>,
}

/// The k-th collective of a group, until all have its result.
#[derive(Debug)]
struct Round {
    given: Vec<Option<Given>>,
    results: Vec<Option<Taken>>,
}

/// A rank's result.
#[derive(Debug)]
pub(super) enum Taken {
    Tensor(Tensor),
    /// A new group, and this rank in it.
    Group(Option<Place>),
}

/// A rank in a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) group: usize,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Hub {
    /// A job of this many ranks; the group of all is the first one.
    pub(super) fn new(ranks: usize) -> Arc<Self> {
        let hub = Self::default();
        hub.lock().new_group((0..ranks).collect());
        Arc::new(hub)
    }

    /// A panic under the lock leaves the state as it was before: it only happens in the code that adds to it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the job for all, for the first reason that was given.
    pub(super) fn break_for_all(&self, failure: Failure) {
        self.lock().broken.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// A rank of the job joins no further collective.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        if !state.left.contains(&rank) {
            state.left.push(rank);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns when the job is broken, or when no other rank is left that could break it.
    pub(super) fn stall(&self) -> Failure {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.broken {
                return failure.clone();
            }
            if state.left.len() + 1 >= state.groups[0].members.len() {
                return Failure::Ended;
            }
            state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What a rank gives for its `round`-th collective. The last one to come makes the results.
    pub(super) fn give(&self, place: Place, round: u64, given: Given) -> Result<(), Failure> {
        let mut state = self.lock();
        let rank = state.groups[place.group].members[place.rank];
        state.may_call(rank)?;
        let rounds = &mut state.groups[place.group].rounds;
        let entry = rounds.entry(round).or_insert_with(|| Round {
            given: (0..place.size).map(|_| None).collect(),
            results: (0..place.size).map(|_| None).collect(),
        });
        entry.given[place.rank] = Some(given);
        if entry.given.iter().all(Option::is_some) {
            let given: Vec<_> = entry.given.drain(..).flatten().collect();
            let outcome = complete(&given);
            if let Err(failure) =
                outcome.and_then(|outcome| state.settle(place.group, round, outcome))
            {
                state.broken.get_or_insert(failure);
            }
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The result of a rank's `round`-th collective.
    pub(super) fn take(
        &self,
        place: Place,
        round: u64,
        deadline: Duration,
    ) -> Result<Taken, Failure> {
        let begin = Instant::now();
        let mut state = self.lock();
        loop {
            let State {
                groups,
                broken,
                finishing,
                ..
            } = &mut *state;
            let Group { members, rounds } = &mut groups[place.group];
            let entry = rounds.get_mut(&round).ok_or(Failure::Ended)?;
            if let Some(taken) = entry.results[place.rank].take() {
                if entry.results.iter().all(Option::is_none) {
                    rounds.remove(&round);
                }
                return Ok(taken);
            }
            let missing = members.iter().zip(&entry.given);
            let missing = missing.filter(|(_, given)| given.is_none());
            let missing: Vec<_> = missing.map(|(rank, _)| *rank).collect();
            if missing.iter().any(|rank| finishing.contains(rank)) {
                broken.get_or_insert_with(|| mismatch(members, &entry.given, finishing));
            }
            // After the above: a collective that all ranks have joined has its result on all of them, whatever happens next.
            state = self.wait(state, missing, begin, deadline)?;
        }
    }

    /// Waits until all ranks of the job have come to their end.
    pub(super) fn finish(&self, rank: usize, deadline: Duration) -> Result<(), Failure> {
        let begin = Instant::now();
        let mut state = self.lock();
        state.may_call(rank)?;
        state.finishing.push(rank);
        self.changed.notify_all();
        loop {
            let State {
                groups, finishing, ..
            } = &*state;
            let missing = groups[0].members.iter();
            let missing = missing.filter(|rank| !finishing.contains(rank));
            let missing: Vec<_> = missing.copied().collect();
            if missing.is_empty() {
                return state.unfinished().map_or(Ok(()), Err);
            }
            state = self.wait(state, missing, begin, deadline)?;
        }
    }

    /// Lets the others go on, for a rank that has been waiting since `begin` for those that are `missing`.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        missing: Vec<usize>,
        begin: Instant,
        deadline: Duration,
    ) -> Result<MutexGuard<'a, State>, Failure> {
        let waited = begin.elapsed();
        if state.broken.is_none() {
            let left = missing.iter().find(|rank| state.left.contains(rank));
            state.broken = match left.copied() {
                Some(rank) => Some(Failure::Rank {
                    rank,
                    message: "it has left the job and does not come".into(),
                }),
                None if waited >= deadline => Some(Failure::Deadline { waited, missing }),
                None => None,
            };
        }
        if let Some(failure) = state.broken.clone() {
            drop(state);
            self.changed.notify_all();
            return Err(failure);
        }
        let result = self.changed.wait_timeout(state, deadline - waited);
        Ok(result.unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// Some ranks have joined a collective for which others, that are at their end, do not come.
fn mismatch(members: &[usize], given: &[Option<Given>], finishing: &[usize]) -> Failure {
    let calls = members.iter().zip(given);
    let calls = calls.filter_map(|(rank, given)| match given {
        Some(given) => Some(given.described(*rank)),
        None if finishing.contains(rank) => Some(format!("rank {rank} calls finish")),
        None => None,
    });
    Failure::Mismatch {
        calls: calls.collect(),
    }
}

impl State {
    /// Whether a rank of the job may begin something.
    fn may_call(&self, rank: usize) -> Result<(), Failure> {
        match &self.broken {
            _ if self.finishing.contains(&rank) => Err(Failure::Ended),
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// A collective that some ranks have started, and not all, when all have come to their end.
    fn unfinished(&self) -> Option<Failure> {
        self.groups.iter().find_map(|group| {
            let rounds = group.rounds.iter();
            let rounds = rounds.filter(|(_, round)| round.given.iter().any(Option::is_none));
            let (_, first) = rounds.min_by_key(|(number, _)| **number)?;
            Some(mismatch(&group.members, &first.given, &self.finishing))
        })
    }

    fn new_group(&mut self, members: Vec<usize>) -> usize {
        self.groups.push(Group {
            members,
            rounds: HashMap::new(),
        });
        self.groups.len() - 1
    }

    fn settle(&mut self, group: usize, round: u64, outcome: Outcome) -> Result<(), Failure> {
        let results = match outcome {
            Outcome::Tensors(tensors) => {
                let tensors = tensors.into_iter().map(Taken::Tensor);
                tensors.map(Some).collect()
            }
            Outcome::Groups(groups) => {
                let of_job = self.groups[group].members.clone();
                let mut places: Vec<_> = of_job.iter().map(|_| None).collect();
                for ranks in groups {
                    let members = ranks.iter().map(|rank| of_job[*rank]).collect();
                    let (group, size) = (self.new_group(members), ranks.len());
                    for (rank, old) in ranks.into_iter().enumerate() {
                        places[old] = Some(Place { group, rank, size });
                    }
                }
                let places = places.into_iter().map(Taken::Group);
                places.map(Some).collect()
            }
        };
        let round = self.groups[group].rounds.get_mut(&round);
        round.ok_or(Failure::Ended)?.results = results;
        Ok(())
    }
}
