//! The columns of a scaling-state table, and how its rows are updated.

use candle_core::Tensor;
use fp8_core::{DelayedRule, Format};

/// The numbers of a table that are stored on its device. Row `i` of every column belongs to one tensor role of one layer.
///
/// Columns are replaced, never changed in place, so a scale taken from an earlier step keeps its value.
#[derive(Debug, Clone)]
pub struct Columns {
    /// f32 `[rows]`, the factor before the cast.
    pub quant_scale: Tensor,
    /// f32 `[rows]`, the factor after decoding.
    pub dequant_scale: Tensor,
    /// f32 `[rows, len]`, newest first.
    pub amax_history: Tensor,
    /// U32 `[rows]`, how many recorded amaxes were Inf or NaN.
    pub non_finite: Tensor,
}

/// How delayed scaling updates one row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowUpdate {
    /// From the history to the scale.
    pub rule: DelayedRule,
    /// The format that the scale is for.
    pub format: Format,
    /// Entries of the history in use; those after them become 0.
    pub window: usize,
    /// Recompute the scale from the history even if nothing was recorded, because it was made for another format.
    pub remake: bool,
}

/// The result of an update.
#[derive(Debug, Clone)]
pub struct Updated {
    /// The new columns.
    pub columns: Columns,
    /// Which rows have a new history or scale; `None` if only the device knows.
    pub changed: Option<Vec<bool>>,
}

/// Amaxes of a step, one per row.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// f32 `[rows]`, the largest finite one; 0 where none was recorded.
    pub amax: Tensor,
    /// U32 `[rows]`, how many casts saw Inf or NaN.
    pub non_finite: Tensor,
}
