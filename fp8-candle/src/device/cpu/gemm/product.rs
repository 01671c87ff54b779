//! A product in progress: its operands, and how they are packed.

use super::super::scratch::LINE;
use super::epilogue::Epilogue;
use super::exponents::Exponents;
use super::kernel::{Engine, Matrix, Place};
use super::layout::{DEPTH, ROWS, ROWS_STEP, SLICE, SLICE_STRIDE, padded};
use super::results::Results;
use super::side::{Elements, Side};
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use fp8_core::{Contraction, HighPrecision};
use half::slice::HalfFloatSliceExt;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Elements from which a second thread pays off for packing.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// Codes from which a separate task pays off.
pub(super) const TASK_CODES: usize = 1 << 15;

/// Indices of the sum that would fit between one packed panel and the next.
const SPREAD: usize = 64;

/// One product in progress.
pub(super) struct Product<'a, T, E> {
    pub(super) engine: E,
    pub(super) a: &'a Side<'a>,
    pub(super) b: &'a Side<'a>,
    /// Length of the segments of the sum that each have their own scales.
    pub(super) segment: Option<usize>,
    /// What is added to exponents of A and of B.
    pub(super) exponents: [Option<&'a Exponents>; 2],
    pub(super) epilogue: &'a Epilogue<'a>,
    /// If the tiles write the results themselves.
    pub(super) results: Option<Results<'a>>,
    pub(super) out: Shared<'a, MaybeUninit<T>>,
    pub(super) threads: usize,
}

/// Kept indices from `first` on, packed as A.
pub(super) struct PackedA<'a, V> {
    pub(super) values: &'a [V],
    pub(super) first: usize,
    pub(super) rows: usize,
}

/// Where panels of B come from.
#[derive(Clone, Copy)]
pub(super) enum Panels<'a, V> {
    /// Packed as B, from panel `first` on.
    Values { values: &'a [V], first: usize },
    /// Packed codes of all panels, decoded in the kernel.
    Packed(&'a [u8]),
    /// Up to [`PANEL`](super::layout::PANEL) columns, packed slice by slice, so that each slice stays in the first-level cache.
    BySlice,
}

impl<T: HighPrecision, E: Engine> Product<'_, T, E> {
    /// Columns of a panel.
    pub(super) const WIDTH: usize = E::ORDER.panel();

    pub(super) fn k(&self) -> usize {
        self.a.contracted()
    }

    pub(super) fn panels(&self) -> usize {
        self.b.kept().div_ceil(Self::WIDTH)
    }

    /// Elements of one panel.
    pub(super) fn panel_len(&self) -> usize {
        padded(self.k()) * Self::WIDTH
    }

    /// Elements from one packed panel to the next. Without this gap, the slices of panels whose length is a power of two would fall into
    /// the same few sets of the second-level cache.
    pub(super) fn values_len(&self) -> usize {
        self.panel_len() + SPREAD * Self::WIDTH
    }

    /// Where the results from this row and column on will be written.
    pub(super) fn place(&self, row: usize, col: usize) -> Place {
        let (cols, element) = (self.b.kept(), size_of::<T>());
        let first = self.out.address().cast::<u8>();
        Place {
            address: first.wrapping_add((row * cols + col) * element),
            element,
            row: cols * element,
        }
    }

    /// Packs with `task`, on this thread only if there are few elements.
    pub(super) fn pack_each(&self, elements: usize, count: usize, task: impl Fn(usize) + Sync) {
        if elements >= PARALLEL_ELEMENTS {
            self.for_each(count, task);
        } else {
            (0..count).for_each(task);
        }
    }

    pub(super) fn for_each(&self, count: usize, task: impl Fn(usize) + Sync) {
        if self.threads > 1 {
            tasks::for_each(count, task);
        } else {
            (0..count).for_each(task);
        }
    }

    /// Whether A is packed in pairs of rows of codes.
    pub(super) fn pairs(&self) -> bool {
        self.a.contraction == Contraction::Rows && self.engine.packs_pairs(self.a.kept())
    }

    /// Packs these kept indices of A, in parallel.
    pub(super) fn pack_a(&self, rows: Range<usize>, values: &mut [E::Value]) {
        let per_task = (TASK_CODES / self.k().max(1))
            .next_multiple_of(ROWS_STEP)
            .max(ROWS_STEP);
        let values = Shared::new(values);
        let elements = rows.len() * self.k();
        self.pack_each(elements, rows.len().div_ceil(per_task), |task| {
            let start = rows.start + task * per_task;
            let part = start..rows.end.min(start + per_task);
            // SAFETY: each task has its own rows, and `per_task` is a multiple of `ROWS_STEP`.
            unsafe { self.pack_rows(part, rows.clone(), values) };
        });
    }

    /// Packs kept indices `part` of A, on this thread. `rows` are all that are packed.
    ///
    /// # Safety
    /// As for [`Engine::pack_a`].
    pub(super) unsafe fn pack_rows(
        &self,
        part: Range<usize>,
        rows: Range<usize>,
        values: Shared<'_, E::Value>,
    ) {
        let (engine, first) = (self.engine, rows.start);
        let padded_rows = rows.len().next_multiple_of(ROWS);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.a.elements {
                Elements::Codes(codes) => {
                    let (matrix, part) = (Matrix::new(self.a, codes), part.clone());
                    engine.pack_a(self.a.format, matrix, part, first, padded_rows, values);
                }
                Elements::Bf16(bits) => {
                    let matrix = Matrix::new(self.a, bits.reinterpret_cast());
                    engine.pack_a_bf16(matrix, part.clone(), first, padded_rows, values);
                }
                Elements::Panels(..) => unreachable!("operand A is never packed beforehand"),
            }
            if let [Some(exponents), _] = self.exponents {
                self.scale_a(exponents, part, first, padded_rows, values);
            }
        }
    }

    /// Packs kept indices `rows` of A for `range` of the sum, on this thread.
    pub(super) fn pack_slice(
        &self,
        rows: Range<usize>,
        range: Range<usize>,
        values: &mut [E::Value],
    ) {
        let Elements::Codes(codes) = self.a.elements else {
            unreachable!("engines that pack slices multiply codes");
        };
        debug_assert!(
            self.exponents[0].is_none(),
            "slices are packed without scales"
        );
        let (matrix, range) = (
            Matrix::new(self.a, codes),
            range.start..range.end.min(self.k()),
        );
        self.engine
            .pack_slice(self.a.format, matrix, rows, range, values);
    }

    /// Scales kept indices `rows` of A as packed; `first` is the kept index of the first packed row.
    ///
    /// # Safety
    /// As for [`Engine::pack_a`].
    unsafe fn scale_a(
        &self,
        exponents: &Exponents,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        values: Shared<'_, E::Value>,
    ) {
        let k = padded(self.k());
        for start in (0..k).step_by(SLICE) {
            let len = SLICE.min(k - start);
            let mut row = rows.start;
            while row < rows.end {
                let engine = self.engine;
                let tile = engine.tile_rows(self.pairs(), row - first, rows.end - first);
                let at = (start / SLICE * padded_rows + row - first) * SLICE_STRIDE;
                // SAFETY: the caller guarantees that only this call uses these rows.
                let values = unsafe { values.part(at..at + len * tile) };
                engine.fold(exponents, row..row + tile, start, values);
                row += tile;
            }
        }
    }

    /// Packs these panels of B, in parallel.
    pub(super) fn pack_panels(&self, panels: Range<usize>, values: &mut [E::Value]) {
        let (len, k) = (self.values_len(), padded(self.k()));
        // Lines of the cache hold the codes of one index of the sum for several panels.
        let least = match self.b.contraction {
            Contraction::Rows => LINE / Self::WIDTH,
            Contraction::Cols => 1,
        };
        let per_task = (TASK_CODES / len.max(1)).max(least);
        let values = Shared::new(values);
        let elements = panels.len() * len;
        self.pack_each(elements, panels.len().div_ceil(per_task), |task| {
            let [first, end] = [task, task + 1].map(|task| panels.len().min(task * per_task));
            // SAFETY: each task has its own panels.
            let values = unsafe { values.part(first * len..end * len) };
            self.pack_part(panels.start + first..panels.start + end, 0..k, len, values);
        });
    }

    /// Packs these panels of B for `range` of the sum, on this thread; `len`: elements from one packed panel to the next.
    pub(super) fn pack_part(
        &self,
        panels: Range<usize>,
        range: Range<usize>,
        len: usize,
        values: &mut [E::Value],
    ) {
        // The codes of one index of the sum for all panels are neighbours, and memory gives them as fast only in long runs.
        let step = match self.b.contraction {
            Contraction::Rows => DEPTH,
            Contraction::Cols => range.len().max(1),
        };
        for begin in range.clone().step_by(step) {
            let part = begin..range.end.min(begin + step);
            let [start, end] = [part.start, part.end].map(|k| (k - range.start) * Self::WIDTH);
            for (panel, values) in panels.clone().zip(values.chunks_mut(len)) {
                self.pack_b(panel, part.clone(), &mut values[start..end]);
            }
        }
    }

    /// Packs a panel of B for `range` of the sum.
    pub(super) fn pack_b(&self, panel: usize, range: Range<usize>, values: &mut [E::Value]) {
        let (first, start) = (panel * Self::WIDTH, range.start);
        self.pack_values(panel, range, values);
        if let [_, Some(exponents)] = self.exponents {
            let panel = first..first + Self::WIDTH;
            self.engine.fold(exponents, panel, start, values);
        }
    }

    fn pack_values(&self, panel: usize, range: Range<usize>, values: &mut [E::Value]) {
        match self.b.elements {
            Elements::Codes(codes) => {
                let matrix = Matrix::new(self.b, codes);
                self.engine
                    .pack_b(self.b.format, matrix, panel * Self::WIDTH, range, values);
            }
            Elements::Bf16(bits) => {
                let matrix = Matrix::new(self.b, bits.reinterpret_cast());
                self.engine
                    .pack_b_bf16(matrix, panel * Self::WIDTH, range, values);
            }
            Elements::Panels(_, codes) => {
                let len = self.panel_len();
                let codes =
                    &codes[panel * len..][range.start * Self::WIDTH..range.end * Self::WIDTH];
                self.engine.decode_panel(self.b.format, codes, values);
            }
        }
    }
}
