//! Histories as other libraries store them.

/// Which entry of a stored history is the newest.
///
/// Ours begin with the newest and end with the oldest. A history of one of these orders holds the same amaxes in other places,
/// so that a state can be handed over in both directions.
///
/// ```
/// use fp8_core::{DelayedRule, Format, HistoryOrder, remake_scale};
/// // Of a flax checkpoint: `input_amax_history` and, through it, the scale of the next step.
/// let history = HistoryOrder::Ring.to_newest_first(&[4.0, 1.0, 2.0, 3.0]);
/// assert_eq!(history, [4.0, 3.0, 2.0, 1.0]);
/// assert_eq!(remake_scale(&DelayedRule::default(), Format::E4M3, &history, 1.0), 112.0);
/// assert_eq!(HistoryOrder::Ring.from_newest_first(&history), [4.0, 1.0, 2.0, 3.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HistoryOrder {
    /// The newest, then all others from the oldest on: flax and fp8layers.
    Ring,
    /// An empty place for the step in progress, then the recorded ones from the oldest on: Transformer Engine and IPEX between
    /// two steps. It holds one recorded amax less than its length.
    RingInProgress,
}

impl HistoryOrder {
    /// A history of ours in this order; as long as `history`. [`HistoryOrder::RingInProgress`] drops the oldest.
    pub fn from_newest_first(self, history: &[f32]) -> Vec<f32> {
        let Some((&newest, older)) = history.split_first() else {
            return vec![];
        };
        let (first, rest) = match self {
            Self::Ring => (newest, older),
            Self::RingInProgress => (0.0, &history[..history.len() - 1]),
        };
        let rest = rest.iter().rev().copied();
        std::iter::once(first).chain(rest).collect()
    }

    /// A history of this order as ours; as long as `history`. An entry other than 0 in the place of a step in progress counts
    /// as recorded.
    pub fn to_newest_first(self, history: &[f32]) -> Vec<f32> {
        let Some((&first, rest)) = history.split_first() else {
            return vec![];
        };
        let rest = rest.iter().rev().copied();
        match self {
            Self::RingInProgress if first == 0.0 => rest.chain(std::iter::once(0.0)).collect(),
            _ => std::iter::once(first).chain(rest).collect(),
        }
    }
}
