//! How the work is divided.

use super::block::QUERIES;
use super::layout::PANEL;
use crate::base::data::attention::Attention;
use std::ops::Range;

/// Enough tasks for the threads of most processors; a constant, so that no sum depends on the number of threads.
const TASKS: usize = 16;

/// Tasks, each with the keys of one head and some blocks of the queries that read them.
pub(super) struct Split {
    kv_heads: usize,
    kv_pairs: usize,
    /// Tasks for each head of keys.
    pub(super) parts: usize,
    /// Blocks of each head of queries.
    blocks: usize,
    group: usize,
}

impl Split {
    pub(super) fn new(attention: &Attention) -> Self {
        let kv_pairs = attention.batch * attention.kv_heads;
        let group = attention.heads / attention.kv_heads;
        let blocks = attention.queries.div_ceil(QUERIES);
        Self {
            kv_heads: attention.kv_heads,
            kv_pairs,
            parts: TASKS.div_ceil(kv_pairs).min(group * blocks),
            blocks,
            group,
        }
    }

    pub(super) fn tasks(&self) -> usize {
        self.kv_pairs * self.parts
    }

    /// Batch entry and head of the keys of a task.
    pub(super) fn kv_head(&self, task: usize) -> [usize; 2] {
        let pair = task / self.parts;
        [pair / self.kv_heads, pair % self.kv_heads]
    }

    /// The keys of a task, from the start of a panel on.
    pub(super) fn keys(&self, attention: &Attention, task: usize) -> Range<usize> {
        let [batch, _] = self.kv_head(task);
        let first = attention.visible(batch, 0).start / PANEL * PANEL;
        first..attention.visible(batch, attention.queries - 1).end
    }

    /// The blocks of a task: batch entry and head, and which block of the head. Those of all tasks of a head of keys take turns,
    /// because later blocks of causal attention see more keys.
    pub(super) fn blocks(&self, task: usize) -> impl Iterator<Item = ([usize; 2], usize)> {
        let [batch, kv_head] = self.kv_head(task);
        let (blocks, first_head) = (self.blocks, kv_head * self.group);
        (task % self.parts..self.group * blocks)
            .step_by(self.parts)
            .map(move |unit| ([batch, first_head + unit / blocks], unit % blocks))
    }
}
