//! The models that a thread has trained, and which reduce over ranks even in steps in which this rank does not use them.

use fp8_candle::StateTable;
use fp8_candle::state::ReductionGroup;
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

thread_local! {
    /// The tables of steps that guards of this thread have ended.
    static TABLES: RefCell<Vec<Weak<StateTable>>> = RefCell::default();
    /// Whether a step with other ranks was discarded because its guard was dropped, and no guard has said so yet.
    static DROPPED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `f` with the tables of this thread; gives the default while the thread ends and they have already been dropped.
fn on_tables<R: Default>(f: impl FnOnce(&mut Vec<Weak<StateTable>>) -> R) -> R {
    TABLES
        .try_with(|tables| f(&mut tables.borrow_mut()))
        .unwrap_or_default()
}

/// Remembers each table once and forgets dropped ones.
pub(super) fn remember(tables: &[Arc<StateTable>]) {
    on_tables(|known| {
        known.retain(|table| table.strong_count() > 0);
        for table in tables {
            let new = Arc::downgrade(table);
            if !known.iter().any(|known| known.ptr_eq(&new)) {
                known.push(new);
            }
        }
    });
}

/// The tables of steps that have ended on this thread.
pub(super) fn tables() -> Vec<Arc<StateTable>> {
    on_tables(|known| known.iter().filter_map(Weak::upgrade).collect())
}

/// Notes that a guard was dropped whose end would have waited for other ranks.
pub(super) fn note_dropped() {
    // A thread that ends opens no further guard.
    let _ = DROPPED.try_with(|dropped| dropped.set(true));
}

/// Whether such a guard was dropped on this thread since the last call. A loaded state replaces what its step has left, so loading asks too.
pub(crate) fn take_dropped() -> bool {
    DROPPED
        .try_with(|dropped| dropped.replace(false))
        .unwrap_or(false)
}

/// Whether a reduction over this group waits for other ranks.
pub(super) fn has_others(group: Option<&Arc<dyn ReductionGroup>>) -> bool {
    group.is_some_and(|group| group.ranks() > 1)
}

/// The part of a session that all ranks share.
#[derive(Debug)]
pub(super) struct Job {
    /// The group of the outermost guard.
    group: Option<Arc<dyn ReductionGroup>>,
    /// With a group, the tables of earlier steps, which reduce whether this rank uses them or not.
    known: Vec<Weak<StateTable>>,
}

impl Job {
    /// The step that begins now on this thread.
    pub(super) fn new(group: Option<Arc<dyn ReductionGroup>>) -> Self {
        let known = match &group {
            Some(_) => on_tables(|known| known.clone()),
            None => vec![],
        };
        Self { group, known }
    }

    /// The next step of the same guard.
    pub(super) fn next(&self) -> Self {
        Self::new(self.group.clone())
    }

    pub(super) fn has_group(&self) -> bool {
        self.group.is_some()
    }

    /// The known tables that reduce over ranks, in the order of all ranks.
    pub(super) fn reducing(&self) -> Vec<Arc<StateTable>> {
        let known = self.known.iter().filter_map(Weak::upgrade);
        let mut tables: Vec<_> = known.filter(|table| table.reduces()).collect();
        in_order(&mut tables, |table| table);
        tables
    }

    /// Whether the step reduces tables of earlier steps over several ranks, whatever it uses itself.
    pub(super) fn waits_for_ranks(&self) -> bool {
        has_others(self.group.as_ref()) && !self.reducing().is_empty()
    }

    /// Counts a step that has ended, also one that does not count.
    pub(super) fn count_step(&self) {
        if let Some(steps) = self.group.as_ref().and_then(|group| group.steps()) {
            steps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Sorts by the name of the first row: threads use models in any order, but all ranks must reduce them in the same one.
pub(super) fn in_order<T>(values: &mut [T], table: impl Fn(&T) -> &Arc<StateTable>) {
    values.sort_by_cached_key(|value| table(value).names().into_iter().next());
}
