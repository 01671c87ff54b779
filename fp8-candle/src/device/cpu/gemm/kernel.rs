//! What the blocked GEMM needs from the kernels of a processor.

use super::super::scratch::{LINE, Plain};
use super::exponents::Exponents;
#[cfg(doc)]
use super::layout::{DEPTH, ROWS_STEP};
use super::layout::{Order, SLICE_STRIDE};
use super::prefetch;
use super::results::Block;
use super::side::Side;
use super::stage::Finished;
use crate::base::parallel::shared::Shared;
use fp8_core::{Contraction, Format, HighPrecision};
use std::ops::Range;

/// Row-major elements of an operand, by default codes, and the dimension that is summed over.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, T = u8> {
    pub(super) elements: &'a [T],
    pub(super) kept: usize,
    pub(super) contracted: usize,
    pub(super) contraction: Contraction,
}

impl<'a, T> Matrix<'a, T> {
    /// `elements` of this operand.
    pub(super) fn new(side: &Side<'_>, elements: &'a [T]) -> Self {
        Self {
            elements,
            kept: side.kept(),
            contracted: side.contracted(),
            contraction: side.contraction,
        }
    }

    /// The position of the element for a kept and a contracted index.
    pub(super) fn place(&self, kept: usize, contracted: usize) -> usize {
        match self.contraction {
            Contraction::Cols => kept * self.contracted + contracted,
            Contraction::Rows => contracted * self.kept + kept,
        }
    }
}

/// One panel of B ([`Order::panel`] columns), from some index of the sum on.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a, V> {
    /// Packed as B.
    Values(&'a [V]),
    /// Packed codes, decoded by the kernel.
    Packed(PackedPanel<'a>),
}

/// Packed codes of a panel, from some index of the sum on.
#[derive(Clone, Copy, Default)]
pub(super) struct PackedPanel<'a> {
    pub(super) codes: &'a [u8],
    /// What is added to the exponents of their values, if anything is: `[segments of DEPTH][PANEL]`.
    #[cfg_attr(
        target_arch = "aarch64",
        allow(dead_code, reason = "only engines of bf16 fold scales")
    )]
    pub(super) added: &'a [u16],
}

#[cfg(target_arch = "x86_64")]
impl PackedPanel<'_> {
    /// What is added to the columns of a segment, if anything is.
    #[inline]
    pub(super) fn added_at(&self, segment: usize) -> &[u16; super::layout::PANEL] {
        &self.added.as_chunks().0[segment]
    }
}

/// Sums of a block; rows are `stride` apart.
pub(super) struct Sums<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
}

/// How to compute sums.
#[derive(Clone, Copy)]
#[cfg_attr(
    target_arch = "aarch64",
    allow(dead_code, reason = "engines of bf16 read `pairs`")
)]
pub(super) struct Mode {
    /// Add to the existing values instead of starting with zero.
    pub(super) accumulate: bool,
    /// The first index of the sum within its slice; 0 if the slice was packed from this index on.
    pub(super) skip: usize,
    /// Elements of A from one slice to the next.
    pub(super) next_slice: usize,
    /// Whether A is packed in pairs of rows of codes ([`Engine::packs_pairs`]).
    pub(super) pairs: bool,
    /// Where the results of these sums will be written, if nothing is added to the sums after this.
    pub(super) out: Option<Place>,
}

/// Where the results of a block are, for prefetches.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// That of the first result.
    pub(super) address: *const u8,
    /// Bytes of an element, and from one row to the next.
    pub(super) element: usize,
    pub(super) row: usize,
}

impl Place {
    /// Prefetches the places of these rows from column `col` on, one line of each.
    #[inline]
    pub(super) fn prefetch(self, rows: Range<usize>, col: usize) {
        for row in rows {
            let at = row * self.row + col * self.element;
            prefetch::to_write(self.address.wrapping_add(at));
        }
    }
}

/// Kernels that decode codes to values of one type, in the layouts of `layout.rs`, and sum their products in f32. Holding an
/// engine is proof that the processor has its instructions.
///
/// The order of each sum depends on its length alone, not on the rows and panels beside it, nor on how codes are laid out.
pub(super) trait Engine: Copy + Send + Sync {
    /// bf16 bits or f32.
    type Value: Plain + Send + Sync + 'static;

    /// The engine set up on a thread, for a B of one format.
    type Session;

    /// The order of packed codes that [`Engine::decode_panel`] reads.
    const ORDER: Order;

    /// The most rows (a multiple of the heights of all tiles, so of 96) and panels of a task: one slice of A and B and the sums
    /// of the task then fit into the second-level cache.
    fn task_size(self) -> (usize, usize) {
        (192, 8)
    }

    /// For products of up to this many rows, decoding packed codes in the kernel is faster than decoding them first.
    fn packed_rows(self) -> usize;

    /// How many neighbouring panels of packed codes are summed to their end before the next ones, for a product of `rows`
    /// rows: panels are read from memory in one piece then. None if it is faster to sum all panels slice by slice.
    fn packed_panels(self, _rows: usize) -> Option<usize> {
        None
    }

    /// How many slices of packed codes [`Engine::multiply`] takes at a time, for a product of `rows` rows.
    fn packed_slices_at_once(self, _rows: usize) -> usize {
        1
    }

    /// Whether an A of `kept` rows that sums over the rows of its codes is packed in pairs of those rows instead of transposed.
    fn packs_pairs(self, _kept: usize) -> bool {
        false
    }

    /// Whether [`Engine::multiply`] takes results.
    fn writes_results(self) -> bool {
        false
    }

    /// Finishes rows as [`Epilogue::finish_row`](super::epilogue::Epilogue::finish_row) does, but faster; false, and nothing is written, if
    /// it cannot.
    fn finish<T: HighPrecision>(self, _finished: &mut Finished<'_, T>) -> bool {
        false
    }

    /// How many slices of unpacked panels [`Engine::multiply`] takes at a time.
    fn slices_at_once(self) -> usize {
        1
    }

    /// Whether each task of a product of many rows packs what it multiplies, instead of all tasks sharing what they have packed
    /// before.
    fn packs_in_tasks(self) -> bool {
        false
    }

    /// Whether packed values, and the kernels that decode packed codes, can take scales that are powers of two into their exponents
    /// ([`Exponents`]).
    fn folds(self) -> bool {
        false
    }

    /// Adds to the exponents of packed values: of one panel of B, or of [`Engine::tile_rows`] rows of a slice of A, from index `start`
    /// of the sum on.
    fn fold(
        self,
        _exponents: &Exponents,
        _kept: Range<usize>,
        _start: usize,
        _values: &mut [Self::Value],
    ) {
        unreachable!("an engine that does not fold scales");
    }

    /// How many rows of A, from row `row` of `rows` packed ones on, lie in one tile whose rows take turns; 1 if each row has its own
    /// place. `pairs`: as in [`Mode::pairs`].
    fn tile_rows(self, _pairs: bool, _row: usize, _rows: usize) -> usize {
        1
    }

    /// Packs kept indices `rows` of `matrix` as A; `first` is the kept index of the first packed row.
    ///
    /// # Safety
    /// No other task may use these rows of `dst`, up to the next multiple of 16, at the same time. `rows.start - first` is a
    /// multiple of [`ROWS_STEP`], and so is `rows.end - first` unless there are no more rows.
    unsafe fn pack_a(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, Self::Value>,
    );

    /// Whether a task of a product of many rows can pack its rows of A slice by slice, with [`Engine::pack_slice`].
    fn packs_slices(self) -> bool {
        false
    }

    /// Packs kept indices `rows` for `range` of the sum as a slice of A, from the beginning of `dst` on. `range` lies within one slice and
    /// begins at a multiple of [`DEPTH`]. Scales are not folded in.
    fn pack_slice(
        self,
        _format: Format,
        _matrix: Matrix<'_>,
        _rows: Range<usize>,
        _range: Range<usize>,
        _dst: &mut [Self::Value],
    ) {
        unreachable!("an engine that packs whole rows");
    }

    /// Packs the panel of kept indices from `first` on as B, for `range` of the sum, which begins and ends at multiples of
    /// the depth of a tile.
    fn pack_b(
        self,
        format: Format,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [Self::Value],
    );

    /// [`Engine::pack_a`] of an operand in bf16, which only engines that multiply bf16 get.
    ///
    /// # Safety
    /// As for [`Engine::pack_a`].
    unsafe fn pack_a_bf16(
        self,
        _matrix: Matrix<'_, u16>,
        _rows: Range<usize>,
        _first: usize,
        _padded_rows: usize,
        _dst: Shared<'_, Self::Value>,
    ) {
        unreachable!("an operand in bf16 for an engine that multiplies f32");
    }

    /// [`Engine::pack_b`] of an operand in bf16, which only engines that multiply bf16 get.
    fn pack_b_bf16(
        self,
        _matrix: Matrix<'_, u16>,
        _first: usize,
        _range: Range<usize>,
        _dst: &mut [Self::Value],
    ) {
        unreachable!("an operand in bf16 for an engine that multiplies f32");
    }

    /// Decodes packed codes into values packed as B.
    fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [Self::Value]);

    /// Sets the engine up.
    ///
    /// # Safety
    /// A thread must have only one session at a time: while it lives, nothing may run that could start other tasks.
    unsafe fn session(self, format: Format) -> Self::Session;

    /// Computes the sums of `rows` rows by `panels` panels, or adds to them. The rows of `a` and `sums` are padded to a
    /// multiple of 16.
    ///
    /// `a`: rows packed as A, from the first slice of the sum on; the first of them is a multiple of [`ROWS_STEP`] rows after the
    /// first packed one.
    /// `results`: where an engine that writes them puts the results instead of the sums, which then are complete.
    #[allow(clippy::too_many_arguments, reason = "one call")]
    fn multiply<'b>(
        session: &Self::Session,
        a: &[Self::Value],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b, Self::Value>,
        sums: Sums<'_>,
        results: Option<Block<'_>>,
        mode: Mode,
    );
}

/// Part `index` of `parts` of `values`, in whole cache lines.
#[inline]
pub(super) fn part<V>(values: &[V], index: usize, parts: usize) -> &[V] {
    let per_part = values
        .len()
        .div_ceil(parts)
        .next_multiple_of(LINE / size_of::<V>());
    let end = values.len().min((index + 1) * per_part);
    &values[end.min(index * per_part)..end]
}

/// As many rows of A as a tile of `height` rows has, from row `row` on; fewer at the end.
#[inline]
pub(super) fn rows_of_a<V>(a: &[V], row: usize, height: usize) -> &[V] {
    let end = a.len().min((row + height) * SLICE_STRIDE);
    &a[end.min(row * SLICE_STRIDE)..end]
}
