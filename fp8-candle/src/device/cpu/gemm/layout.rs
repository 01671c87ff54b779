//! The memory layouts that the kernels read, and the scalar definition of each packing.
//!
//! Sums are padded with zeros to a multiple of [`DEPTH`].
//!
//! - A: rows of bf16, cut into slices of [`SLICE`] elements along the sum: `[slices][rows][SLICE_STRIDE]`. With a
//!   constant stride, the offsets of a tile's rows are constants, and the rows spread over the cache.
//!   For `vdpbf16ps`, an A that sums over rows keeps its order instead: `[slices][tiles][pairs][rows of the tile][2]`.
//!   `tile_bf16.rs` cuts rows into tiles; a tile begins where its first row would begin otherwise.
//!   In f32 likewise, `[slices][tiles][sum][rows of the tile]`: one stream of values instead of one per row.
//! - B: panels of [`Order::panel`] columns: `[panels][sum][columns]` for f32, `[panels][pairs][columns][2]` for bf16, since
//!   `vdpbf16ps` and AMX sum over pairs of neighbours.
//! - packed codes: panels like those of B, but of bytes, in an [`Order`] for each of the two.

use super::super::pages;
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;

/// Columns of a panel of B: two vectors of 16 f32 sums.
pub(super) const PANEL: usize = 32;

/// Columns of a panel of B: two vectors of 8 f32 sums, or four of 4.
pub(super) const NARROW_PANEL: usize = 16;

/// Sums are padded to a multiple of this: the depth of an AMX tile.
pub(super) const DEPTH: usize = 32;

/// Elements of a slice of A along the sum: a slice of a few rows stays in the first-level cache.
pub(super) const SLICE: usize = 256;

/// Elements from one row of a slice to the next.
pub(super) const SLICE_STRIDE: usize = SLICE + 32;

/// Rows of A are padded to a multiple of this: the rows of an AMX tile.
pub(super) const ROWS: usize = 16;

/// Rows of A that one task packs or multiplies are a multiple of this, hence of the height of every tile.
pub(super) const ROWS_STEP: usize = 96;

/// The length of a sum with its padding.
pub(super) fn padded(k: usize) -> usize {
    k.next_multiple_of(DEPTH)
}

/// Elements of `rows` rows packed as A.
pub(super) fn a_len(rows: usize, k: usize) -> usize {
    k.div_ceil(SLICE) * rows.next_multiple_of(ROWS) * SLICE_STRIDE
}

/// Elements of `kept` indices packed as B in panels of `panel` columns, or of packed codes.
pub(super) fn b_len(panel: usize, kept: usize, k: usize) -> usize {
    kept.next_multiple_of(panel) * padded(k)
}

/// The order of packed codes within a panel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in super::super) enum Order {
    /// `[pairs][PANEL][2]`, for f32: a 16-bit lane holds a column's codes of two neighbouring sum indices.
    Columns,
    /// `[pairs][NARROW_PANEL][2]`, for f32 in shorter vectors.
    NarrowColumns,
    /// For bf16: each pair of sum indices has 64 bytes, a vector of four lanes. Their low halves hold columns 0 to 15 and
    /// their high halves 16 to 31, so that decoding to bytes and interleaving gives two vectors of columns in order.
    Pairs,
}

impl Order {
    /// Columns of a panel.
    pub(super) const fn panel(self) -> usize {
        match self {
            Self::Columns | Self::Pairs => PANEL,
            Self::NarrowColumns => NARROW_PANEL,
        }
    }

    /// The position of the code of column `col` (below [`Order::panel`]) and sum index `k` in its panel.
    pub(super) const fn place(self, col: usize, k: usize) -> usize {
        match self {
            Self::Columns | Self::NarrowColumns => (k / 2 * self.panel() + col) * 2 + k % 2,
            Self::Pairs => {
                let (half, lane, column) = (col / 16, col % 16 / 4, col % 4);
                k / 2 * 64 + lane * 16 + half * 8 + column * 2 + k % 2
            }
        }
    }

    /// The position of the code of kept index `kept` and sum index `index` among packed codes, whose sums have length `k`.
    pub(super) fn position(self, k: usize, kept: usize, index: usize) -> usize {
        let width = self.panel();
        kept / width * padded(k) * width + self.place(kept % width, index)
    }
}

/// Packs row-major codes `[n, k]` into panels.
pub(in super::super) fn pack_codes(order: Order, codes: &[u8], n: usize, k: usize) -> Vec<u8> {
    let width = order.panel();
    let all = b_len(width, n, k);
    // Few-row products read several panels in turn: in small pages each of these streams would wait for its pages.
    let mut packed = pages::vec_for(all);
    packed.resize(all, 0);
    let len = padded(k) * width;
    let panels = Shared::new(&mut packed);
    tasks::for_each(n.div_ceil(width), |panel| {
        // SAFETY: each task has its own panel.
        let dst = unsafe { panels.part(panel * len..(panel + 1) * len) };
        let cols = width.min(n - panel * width);
        let codes = &codes[panel * width * k..][..cols * k];
        for (col, codes) in codes.chunks(k.max(1)).enumerate() {
            for (k, &code) in codes.iter().enumerate() {
                dst[order.place(col, k)] = code;
            }
        }
    });
    packed
}

/// The inverse of [`pack_codes`].
pub(in super::super) fn unpack_codes(order: Order, packed: &[u8], n: usize, k: usize) -> Vec<u8> {
    let width = order.panel();
    let mut codes = vec![0; n * k];
    for (panel, codes) in packed
        .chunks((padded(k) * width).max(1))
        .zip(codes.chunks_mut((k * width).max(1)))
    {
        for (col, codes) in codes.chunks_mut(k).enumerate() {
            for (k, code) in codes.iter_mut().enumerate() {
                *code = panel[order.place(col, k)];
            }
        }
    }
    codes
}

#[cfg(test)]
pub(super) mod reference {
    //! Packing to bf16, element by element.

    use super::*;
    use fp8_core::Format;
    use half::bf16;

    /// `code(row, k)` packed as A: `rows x k` elements and the padding of the sum.
    pub(in super::super) fn pack_a(
        format: Format,
        rows: usize,
        k: usize,
        code: impl Fn(usize, usize) -> u8,
    ) -> Vec<u16> {
        let padded_rows = rows.next_multiple_of(ROWS);
        let mut packed = vec![0; a_len(rows, k)];
        for row in 0..rows {
            for k in 0..k {
                let at = (k / SLICE * padded_rows + row) * SLICE_STRIDE + k % SLICE;
                packed[at] = bf16::from_f32(format.decode(code(row, k))).to_bits();
            }
        }
        packed
    }

    /// `code(row, k)` packed as A in tiles of pairs; what lies behind a tile is zero.
    #[cfg(target_arch = "x86_64")]
    pub(in super::super) fn pack_a_pairs(
        format: Format,
        rows: usize,
        k: usize,
        code: impl Fn(usize, usize) -> u8,
    ) -> Vec<u16> {
        let padded_rows = rows.next_multiple_of(ROWS);
        let mut packed = vec![0; a_len(rows, k)];
        let mut first = 0;
        while first < rows {
            let height = super::super::tile_bf16::height(first, rows);
            for row in 0..height {
                for k in 0..k {
                    let tile = (k / SLICE * padded_rows + first) * SLICE_STRIDE;
                    let at = tile + (k % SLICE / 2 * height + row) * 2 + k % 2;
                    packed[at] = bf16::from_f32(format.decode(code(first + row, k))).to_bits();
                }
            }
            first += height;
        }
        packed
    }

    /// `code(col, k)` packed as B.
    pub(in super::super) fn pack_b(
        format: Format,
        cols: usize,
        k: usize,
        code: impl Fn(usize, usize) -> u8,
    ) -> Vec<u16> {
        let mut packed = vec![0; b_len(PANEL, cols, k)];
        for col in 0..cols {
            for index in 0..k {
                let at = (col / PANEL * padded(k) / 2 + index / 2) * 2 * PANEL
                    + col % PANEL * 2
                    + index % 2;
                packed[at] = bf16::from_f32(format.decode(code(col, index))).to_bits();
            }
        }
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_codes_come_back() {
        for (n, k) in [(0, 3), (1, 1), (5, 0), (31, 33), (32, 64), (70, 129)] {
            let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 + i / 251) as u8).collect();
            for order in [Order::Columns, Order::NarrowColumns, Order::Pairs] {
                let packed = pack_codes(order, &codes, n, k);
                assert_eq!(unpack_codes(order, &packed, n, k), codes, "{n} {k}");
                let nonzero = |codes: &[u8]| codes.iter().filter(|&&code| code != 0).count();
                assert_eq!(nonzero(&packed), nonzero(&codes), "{n} {k}");
            }
        }
    }
}
