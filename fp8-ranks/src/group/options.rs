//! The options of a group.

use crate::sum::SumOrder;
use std::time::Duration;

/// Options of a [`crate::ProcessGroup`], which its subgroups inherit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long a rank waits for the others in one operation before it gives up. Ranks that save a checkpoint or evaluate let
    /// the others wait: 10 minutes unless set.
    pub deadline: Duration,
    /// The order of sums.
    pub sum_order: SumOrder,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(600),
            sum_order: SumOrder::default(),
        }
    }
}

impl GroupOptions {
    /// With another [`GroupOptions::deadline`].
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// With another [`GroupOptions::sum_order`].
    #[must_use]
    pub fn with_sum_order(mut self, sum_order: SumOrder) -> Self {
        self.sum_order = sum_order;
        self
    }
}
