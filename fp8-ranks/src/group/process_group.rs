//! The group.

use super::member::Member;
use super::options::GroupOptions;
use super::started::{Stage, Started, Then};
use crate::engine::{Collective, Engine};
use crate::error::{Error, Failure, Operation, Result};
use crate::single::Single;
use crate::traffic::{Counters, Traffic};
use fp8_candle::state::ReductionGroup;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

/// A group of ranks that work together, as one of them sees it. Clones are the same group.
///
/// **All ranks of a group make the same calls in the same order**, each with its own data. A call that fails lets the others
/// know: in a group of processes it ends this process with a message (see [`crate::World`]), which ends the job; in a group of
/// threads all ranks get an error. Nothing can be called after it.
///
/// Tensors may be on any device and need not be contiguous. *Rows* are the first dimension. Results are new tensors without a
/// graph, on the device of what was given.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_ranks::{ReduceOp, threads};
///
/// let sums = threads::run(3, |group| -> candle_core::Result<Vec<f32>> {
///     let own = Tensor::new(&[1f32, group.rank() as f32], &Device::Cpu)?;
///     group.all_reduce(&own, ReduceOp::Sum)?.to_vec1()
/// });
/// for sum in sums {
///     assert_eq!(sum?, [3., 3.]);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    pub(super) member: Arc<Member>,
}

impl ProcessGroup {
    /// A group over an engine. All ranks call it.
    ///
    /// # Errors
    /// The engine cannot make the group for amaxes.
    pub fn new(engine: Arc<dyn Engine>, name: &str, options: GroupOptions) -> Result<Self> {
        Self::over(engine, name, options, vec![])
    }

    /// [`ProcessGroup::new`] of ranks of the groups `within`.
    fn over(
        engine: Arc<dyn Engine>,
        name: &str,
        options: GroupOptions,
        within: Vec<Weak<Member>>,
    ) -> Result<Self> {
        let name: Arc<str> = name.into();
        let split = engine.split(&name, Some(0), engine.rank(), options.deadline);
        let member = |amaxes| Member {
            name,
            amaxes,
            options,
            counters: Counters::default(),
            steps: AtomicU64::default(),
            engine: Arc::clone(&engine),
            within,
        };
        let (split, amaxes) = match split {
            Ok(Some(amaxes)) => (Ok(()), amaxes),
            Ok(None) => (Err(Failure::Ended), Arc::clone(&engine)),
            Err(failure) => (Err(failure), Arc::clone(&engine)),
        };
        let member = Arc::new(member(amaxes));
        member.checked(Operation::Split, split)?;
        Ok(Self { member })
    }

    /// The group of a job of one process.
    pub fn single() -> Self {
        let member = Member {
            name: "world".into(),
            engine: Arc::new(Single),
            amaxes: Arc::new(Single),
            options: GroupOptions::default(),
            counters: Counters::default(),
            steps: AtomicU64::default(),
            within: vec![],
        };
        Self {
            member: Arc::new(member),
        }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.member.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.member.size()
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.member.name
    }

    /// The library that connects the ranks.
    pub fn engine(&self) -> &'static str {
        self.member.engine.name()
    }

    /// Its engine, for an engine over it.
    #[cfg(feature = "nccl")]
    pub(crate) fn engine_of_group(&self) -> Arc<dyn Engine> {
        Arc::clone(&self.member.engine)
    }

    /// A group of the same ranks over another engine, with the options of this one.
    #[cfg(feature = "nccl")]
    pub(crate) fn with_engine(&self, engine: Arc<dyn Engine>, name: &str) -> Result<Self> {
        Self::over(engine, name, self.member.options, self.lineage())
    }

    /// The options of the group.
    pub fn options(&self) -> GroupOptions {
        self.member.options
    }

    /// The group of the ranks that give the same color, in the order of their keys (then of their ranks), or `None` for a rank
    /// without a color. All ranks call it. `name` is the new group's in messages; it has the options of this one and counters
    /// of its own.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    pub fn split(&self, color: Option<usize>, key: usize, name: &str) -> Result<Option<Self>> {
        let Member {
            engine, options, ..
        } = &*self.member;
        let split = engine.split(&self.member.name, color, key, options.deadline);
        let engine = self.member.checked(Operation::Split, split)?;
        let group = engine.map(|engine| Self::over(engine, name, *options, self.lineage()));
        group.transpose()
    }

    /// The group and those that it was made from.
    fn lineage(&self) -> Vec<Weak<Member>> {
        let mut all = self.member.within.clone();
        all.push(Arc::downgrade(&self.member));
        all
    }

    /// Whether `group` is known to have all ranks of this one: it is this group, or this one was [split](ProcessGroup::split) from it or
    /// made of it [with other options](ProcessGroup::with_options).
    pub fn is_within(&self, group: &dyn ReductionGroup) -> bool {
        let identity = group.identity();
        let mut all = self.lineage().into_iter();
        all.any(|member| member.as_ptr().addr() == identity)
    }

    /// The same ranks, engine and name with other options, and counters of its own. All ranks call it with the same options.
    pub fn with_options(&self, options: GroupOptions) -> Self {
        let Member {
            name,
            engine,
            amaxes,
            ..
        } = &*self.member;
        let member = Member {
            name: Arc::clone(name),
            engine: Arc::clone(engine),
            amaxes: Arc::clone(amaxes),
            options,
            counters: Counters::default(),
            steps: AtomicU64::default(),
            within: self.lineage(),
        };
        Self {
            member: Arc::new(member),
        }
    }

    /// What this rank has sent.
    pub fn traffic(&self) -> Traffic {
        self.member.counters.read()
    }

    /// Counts from 0 again.
    pub fn reset_traffic(&self) {
        self.member.counters.reset();
    }

    /// This rank cannot continue, and the others need not wait for it: ends the job with `reason` in the message (processes: this
    /// process with a code other than 0), or gives the error to all (threads). In a group of one rank it is only made into an
    /// error.
    pub fn give_up(&self, reason: impl fmt::Display) -> Error {
        let error = Error::GaveUp {
            rank: self.rank(),
            size: self.size(),
            group: Arc::clone(&self.member.name),
            reason: reason.to_string(),
        };
        self.member.engine.give_up(&error);
        error
    }

    /// Ends the engine when all ranks of the job call it.
    pub(crate) fn finish(&self) -> Result<()> {
        self.member.finish()
    }

    pub(super) fn counts(&self, counts: &[usize]) -> Failure {
        Failure::Counts {
            got: counts.len(),
            ranks: self.size(),
        }
    }

    /// Counts the call, and says where its preparation failed.
    pub(super) fn begin<T>(&self, operation: Operation, result: Result<T, Failure>) -> Result<T> {
        self.member.counters.call(operation);
        self.member.checked(operation, result)
    }

    pub(super) fn start(
        &self,
        operation: Operation,
        collective: Collective,
        then: Then,
    ) -> Result<Started> {
        let engine = &*self.member.engine;
        let pending = self.member.start(engine, operation, collective)?;
        let stage = Stage::Last { pending, then };
        Ok(Started::new(Arc::clone(&self.member), operation, stage))
    }
}
