//! The options of the loss.

/// Settings of [`cross_entropy_with`](super::cross_entropy_with).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CrossEntropyOptions {
    /// Positions with this target are left out of the sum and of the mean, and get no gradient. It need not be a class;
    /// negative values need signed targets.
    pub ignore_index: Option<i64>,
}

impl CrossEntropyOptions {
    /// The same options with another [`CrossEntropyOptions::ignore_index`].
    pub fn with_ignore_index(self, ignore_index: impl Into<Option<i64>>) -> Self {
        Self {
            ignore_index: ignore_index.into(),
        }
    }
}

pub(super) const OP: &str = "cross_entropy";
