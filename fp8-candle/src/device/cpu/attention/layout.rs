//! How the operands of a product lie in memory: cells of 32 bits, one f32, or a pair of bf16 that are neighbours in the sum.

/// Columns of a tile.
pub(super) const PANEL: usize = 32;

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) cells: &'a [u32],
    pub(super) row_stride: usize,
    pub(super) step_stride: usize,
}

/// The right operand of a product: 32 columns.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) cells: &'a [u32],
    /// From one step to the next.
    pub(super) stride: usize,
    pub(super) steps: usize,
}

/// Rows of 32 sums.
pub(super) struct Sums<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
    /// Whether to add to the values.
    pub(super) accumulate: bool,
}
