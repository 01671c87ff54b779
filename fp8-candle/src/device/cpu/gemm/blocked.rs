//! FP8 GEMM in tiles: codes are decoded into panels, multiplied tile by tile with f32 sums, scaled at the end.
//!
//! Every FP8 value is exact in bf16 and f32, and every product of two of them in f32. The order of each sum depends only on
//! its length: slices of the sum are added in order, for any tiles and threads and whatever the rows and columns beside it.

use super::super::scratch::Scratch;
use super::epilogue::{Epilogue, merge_segment};
use super::exponents::Exponents;
use super::in_tasks::TOGETHER;
use super::kernel::{Engine, Mode, PackedPanel, Panel, Sums};
use super::layout::{DEPTH, PANEL, ROWS, ROWS_STEP, SLICE, SLICE_STRIDE, a_len, padded};
use super::product::{PackedA, Panels, Product, TASK_CODES};
use super::results::Block;
use super::scales::Scales;
use super::side::{Elements, Side};
use super::stage::{Finished, Stage};
use crate::base::parallel::shared::Shared;
use fp8_core::HighPrecision;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes of packed values of one operand at a time; a larger operand is packed and multiplied in parts.
const PACKED_BYTES: usize = 32 << 20;

/// Up to this many rows, every panel is packed by the task that needs it.
const NARROW_ROWS: usize = 192;

/// Multiply-adds from which a second thread pays off: some microseconds.
const PARALLEL_WORK: usize = 1 << 19;

/// Whether the scales of these operands can be applied between segments of the sum, or at its end.
pub(super) fn handles(a: &Side<'_>, b: &Side<'_>) -> bool {
    [a, b]
        .iter()
        .all(|side| side.segment().is_none_or(|len| len.is_multiple_of(DEPTH)))
}

/// `[a.kept, b.kept]` into `out`; every element is written.
pub(super) fn gemm<T: HighPrecision, E: Engine>(
    engine: E,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) {
    let (m, n, k) = (a.kept(), b.kept(), a.contracted());
    if m == 0 || n == 0 {
        return;
    }
    assert_eq!(out.len(), m * n);
    let product = |exponents: [Option<&Exponents>; 2], out: &mut [MaybeUninit<T>]| {
        let segment = segment(a, b).filter(|_| exponents.iter().all(Option::is_none));
        let scales = |side: &Side<'_>, exponents: Option<&Exponents>| match exponents {
            Some(exponents) => exponents.scales(),
            None if segment.is_some() => Scales::NONE,
            None => Scales::of(side),
        };
        let [a_exponents, b_exponents] = exponents;
        let epilogue = Epilogue::new(scales(a, a_exponents), scales(b, b_exponents), bias);
        let out = Shared::new(out);
        let product = Product {
            engine,
            a,
            b,
            segment,
            exponents,
            epilogue: &epilogue,
            results: epilogue.results(n, out).filter(|_| engine.writes_results()),
            out,
            threads: match m * n * k < PARALLEL_WORK {
                true => 1,
                false => rayon::current_num_threads(),
            },
        };
        if m <= NARROW_ROWS {
            product.narrow();
        } else if !(engine.packs_in_tasks() && product.in_tasks()) {
            product.wide();
        }
    };
    let exponents = |side| engine.folds().then(|| Exponents::new(side)).flatten();
    let (of_a, of_b) = (exponents(a), exponents(b));
    let folded = |side: &Side<'_>, exponents: &Option<Exponents>| {
        side.segment().is_none() || exponents.is_some()
    };
    if !(folded(a, &of_a) && folded(b, &of_b)) {
        return product([None; 2], out);
    }
    product([of_a.as_ref(), of_b.as_ref()], out);
    let [rows, cols] = [&of_a, &of_b].map(|of| of.as_ref().map_or(&[][..], Exponents::refused));
    if !(rows.is_empty() && cols.is_empty()) {
        // Each result depends on its own row and column alone.
        let mut other = Vec::with_capacity(m * n);
        let other = &mut other.spare_capacity_mut()[..m * n];
        product([None; 2], other);
        for &row in rows {
            out[row * n..(row + 1) * n].copy_from_slice(&other[row * n..(row + 1) * n]);
        }
        for row in 0..m {
            for &col in cols {
                out[row * n + col] = other[row * n + col];
            }
        }
    }
}

/// Length of the segments of the sum over which the scales of both operands are the same, if there is more than one.
fn segment(a: &Side<'_>, b: &Side<'_>) -> Option<usize> {
    match (a.segment(), b.segment()) {
        (Some(a), Some(b)) => Some(greatest_common_divisor(a, b)),
        (a, b) => a.or(b),
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

impl<T: HighPrecision, E: Engine> Product<'_, T, E> {
    /// Few rows: every panel is packed by the task that needs it, and stays in that core's cache.
    fn narrow(&self) {
        let m = self.a.kept();
        let mut values = Scratch::new(a_len(m, self.k()));
        self.pack_a(0..m, &mut values);
        let a = PackedA {
            values: &values,
            first: 0,
            rows: m,
        };
        let panels = self.panels();
        let packed = match self.b.elements {
            Elements::Panels(_, codes) if m <= self.engine.packed_rows() => Some(codes),
            _ => None,
        };
        let streamed = packed.and_then(|_| self.engine.packed_panels(m));
        let together = streamed.unwrap_or(1).max(PANEL / Self::WIDTH);
        let per_task = (TASK_CODES / self.panel_len().max(1))
            .min(panels / (4 * self.threads))
            .max(1)
            .next_multiple_of(together);
        self.for_each(panels.div_ceil(per_task), |task| {
            let panels = task * per_task..panels.min((task + 1) * per_task);
            let (from, together) = match packed {
                Some(codes) => (Panels::Packed(codes), streamed.unwrap_or(panels.len())),
                None if self.engine.packs_in_tasks() => (Panels::BySlice, TOGETHER),
                None => (Panels::BySlice, PANEL / Self::WIDTH),
            };
            for first in panels.clone().step_by(together.max(1)) {
                let panels = first..panels.end.min(first + together);
                self.block(Some(&a), 0..m, panels, from, None);
            }
        });
    }

    /// Many rows: B is packed before the tiles that share it are multiplied, and so is A, unless each task packs its own rows.
    fn wide(&self) {
        let (m, k) = (self.a.kept(), self.k());
        let rows_at_once = {
            let row = a_len(ROWS, k) / ROWS * size_of::<E::Value>();
            (PACKED_BYTES / row.max(1) / ROWS_STEP).max(1) * ROWS_STEP
        };
        let panels_at_once = {
            let panel = self.panel_len() * size_of::<E::Value>();
            (PACKED_BYTES / panel.max(1)).max(1)
        };
        let panels = self.panels();
        let mut b_values = Scratch::new(panels.min(panels_at_once) * self.values_len());
        let own = self.own_rows(panels_at_once);
        let shared = own.map_or(m.min(rows_at_once), |_| 0);
        let mut a_values = Scratch::new(a_len(shared, k));
        for first in (0..panels).step_by(panels_at_once) {
            let panels = first..panels.min(first + panels_at_once);
            self.pack_panels(panels.clone(), &mut b_values);
            let b = Panels::Values {
                values: &b_values,
                first,
            };
            if let Some(task_rows) = own {
                self.in_slices(task_rows, panels, b);
                continue;
            }
            for first in (0..m).step_by(rows_at_once) {
                let rows = first..m.min(first + rows_at_once);
                // One part of A is used for all parts of B.
                if m > rows_at_once || panels.start == 0 {
                    self.pack_a(rows.clone(), &mut a_values);
                }
                let a = PackedA {
                    values: &a_values,
                    first,
                    rows: rows.len(),
                };
                let (task_rows, task_panels) = self.task_size(rows.len(), panels.len());
                let down = rows.len().div_ceil(task_rows);
                self.for_each(down * panels.len().div_ceil(task_panels), |task| {
                    let row = rows.start + task % down * task_rows;
                    let panel = panels.start + task / down * task_panels;
                    let rows = row..rows.end.min(row + task_rows);
                    self.block(
                        Some(&a),
                        rows,
                        panel..panels.end.min(panel + task_panels),
                        b,
                        None,
                    );
                });
            }
        }
    }

    /// Rows and panels of a task: small enough that each thread gets several.
    fn task_size(&self, rows: usize, panels: usize) -> (usize, usize) {
        let (mut task_rows, mut task_panels) = self.engine.task_size();
        let enough = |task_rows: usize, task_panels: usize| {
            let tasks = rows.div_ceil(task_rows) * panels.div_ceil(task_panels);
            self.threads == 1 || tasks >= 8 * self.threads
        };
        while !enough(task_rows, task_panels) && task_panels > 2 {
            task_panels /= 2;
        }
        while !enough(task_rows, task_panels) && task_rows > ROWS_STEP {
            task_rows = (task_rows / 2).next_multiple_of(ROWS_STEP);
        }
        (task_rows, task_panels)
    }

    /// Multiplies and finishes these rows by these panels. `a`: packed rows; without them, this packs its own slice by slice. `stage`: what
    /// writes results that tiles leave as sums, and the panels of the task.
    pub(super) fn block(
        &self,
        a: Option<&PackedA<'_, E::Value>>,
        rows: Range<usize>,
        panels: Range<usize>,
        b: Panels<'_, E::Value>,
        stage: Option<(&mut Stage, &Range<usize>)>,
    ) {
        let stride = panels.len() * Self::WIDTH;
        let padded_rows = rows.len().next_multiple_of(ROWS);
        let results = self
            .results
            .filter(|_| self.segment.is_none() && self.k() > 0);
        if let Some(results) = results {
            // SAFETY: each task has its own rows and columns.
            let block = unsafe { results.block(rows.start, panels.start * Self::WIDTH) };
            let kept = if self.k() > SLICE * self.engine.slices_at_once() {
                padded_rows * stride
            } else {
                0
            };
            let mut sums = Scratch::<f32>::new(kept);
            let range = 0..padded(self.k());
            self.sum(a, &rows, &panels, b, range, &mut sums, Some(block));
            return;
        }
        let mut sums = Scratch::<f32>::new(padded_rows * stride);
        match self.segment {
            None if self.k() > 0 => {
                self.sum(a, &rows, &panels, b, 0..padded(self.k()), &mut sums, None);
            }
            None => sums.fill(0.),
            Some(len) => {
                sums.fill(0.);
                let mut part = Scratch::<f32>::new(sums.len());
                let (mut row_scales, mut col_scales) = (vec![1.; rows.len()], vec![1.; stride]);
                for start in (0..self.k()).step_by(len) {
                    let end = padded(self.k()).min(start + len);
                    self.sum(a, &rows, &panels, b, start..end, &mut part, None);
                    self.a.scales_into(rows.start, start, &mut row_scales);
                    self.b
                        .scales_into(panels.start * Self::WIDTH, start, &mut col_scales);
                    merge_segment(&part, &row_scales, &col_scales, &mut sums);
                }
            }
        }
        let n = self.b.kept();
        let cols_of =
            |panels: &Range<usize>| panels.start * Self::WIDTH..n.min(panels.end * Self::WIDTH);
        let cols = cols_of(&panels);
        let (stage, of_task) = match stage {
            Some((stage, panels)) => (Some(stage), cols_of(panels)),
            None => (None, cols.clone()),
        };
        let mut finished = Finished {
            epilogue: self.epilogue,
            rows,
            cols,
            sums: &sums,
            stride,
            out: self.out,
            n,
            of_task,
            stage,
        };
        if !self.engine.finish(&mut finished) {
            finished.with(|row, first, sums, out| self.epilogue.finish_row(row, first, sums, out));
        }
    }

    /// The unscaled sums over `range`, which begins and ends at multiples of [`DEPTH`]. With `results`, `sums` holds
    /// intermediate sums only.
    #[allow(clippy::too_many_arguments, reason = "what, where from and where to")]
    fn sum(
        &self,
        a: Option<&PackedA<'_, E::Value>>,
        rows: &Range<usize>,
        panels: &Range<usize>,
        b: Panels<'_, E::Value>,
        range: Range<usize>,
        sums: &mut [f32],
        results: Option<Block<'_>>,
    ) {
        // SAFETY: sessions are made only here, and packing and multiplying run no other tasks.
        let session = unsafe { self.engine.session(self.b.format) };
        let stride = panels.len() * Self::WIDTH;
        let a_rows = a.map_or(rows.len(), |a| a.rows).next_multiple_of(ROWS);
        let mut slice = Scratch::new(if a.is_none() {
            a_rows * SLICE_STRIDE
        } else {
            0
        });
        let at_once = match b {
            Panels::Packed(_) => self.engine.packed_slices_at_once(rows.len()),
            _ => self.engine.slices_at_once(),
        };
        let span = at_once.saturating_mul(SLICE);
        let mut packed = match b {
            Panels::BySlice => Some(Scratch::new(range.len().min(span) * stride)),
            _ => None,
        };
        let place = || self.place(rows.start, panels.start * Self::WIDTH);
        let out = self.segment.is_none().then(place);
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / span + 1).saturating_mul(span));
            let (a_values, skip) = match a {
                Some(a) => {
                    let row = start / SLICE * a_rows + rows.start - a.first;
                    (&a.values[row * SLICE_STRIDE..], start % SLICE)
                }
                None => {
                    self.pack_slice(rows.clone(), start..end, &mut slice);
                    (&*slice, 0)
                }
            };
            let slice_len = (end - start) * Self::WIDTH;
            if let Some(packed) = &mut packed {
                self.pack_part(panels.clone(), start..end, slice_len, packed);
            }
            let panel = |index: usize| {
                let part = |first: usize, len: usize| {
                    let panel = (panels.start + index - first) * len;
                    panel + start * Self::WIDTH..panel + end * Self::WIDTH
                };
                match b {
                    Panels::Values { values, first } => {
                        Panel::Values(&values[part(first, self.values_len())])
                    }
                    Panels::Packed(codes) => Panel::Packed(PackedPanel {
                        codes: &codes[part(0, self.panel_len())],
                        added: self.exponents[1]
                            .map_or(&[], |of_b| of_b.of_panel(panels.start + index, start..end)),
                    }),
                    Panels::BySlice => {
                        let packed = packed.as_deref().unwrap_or_default();
                        Panel::Values(&packed[index * slice_len..][..slice_len])
                    }
                }
            };
            E::multiply(
                &session,
                a_values,
                rows.len(),
                panels.len(),
                panel,
                Sums {
                    values: sums,
                    stride,
                },
                results.filter(|_| end == range.end),
                Mode {
                    accumulate: start > range.start,
                    skip,
                    next_slice: a_rows * SLICE_STRIDE,
                    pairs: self.pairs(),
                    out: out.filter(|_| end == range.end),
                },
            );
            start = end;
        }
    }
}
