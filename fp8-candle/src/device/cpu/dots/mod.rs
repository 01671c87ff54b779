//! Products whose rows do not depend on each other: `y[i, j] = sum over l of x[i, l] w[j, l]`, where each sum has the same order
//! for any number of rows and of columns.
//!
//! Term l belongs to lane `l % LANES`. A lane adds its terms one by one; the lanes are added at the end, as [`tile`] says. Sums
//! are padded with zeros, so the padding belongs to every sum as well.

mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use super::scratch::{Plain, Scratch};
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use fp8_core::Isa;
#[cfg(target_arch = "x86_64")]
use fp8_core::IsaLevel;
use std::ops::Range;
use tile::{Adds, LANES, Portable, Tiles, Weights, Widen};

/// Rows of an operand: writes rows `rows`, each of the length of the sums, to `dst`; they begin `stride` elements apart.
pub(super) trait Rows<V>: Fn(Range<usize>, usize, &mut [V]) + Sync {}

impl<V, F: Fn(Range<usize>, usize, &mut [V]) + Sync> Rows<V> for F {}

/// `finish(row, col, sums)`, see [`product`].
type Finish<'a, V> = &'a (dyn Fn(usize, usize, &[V]) + Sync);

/// Sizes of a product: rows of x, rows of w, and the length of the sums.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// A type in which kernels read the rows of w where they lie.
#[cfg(target_arch = "x86_64")]
pub(super) trait Held: Widen<f32> + x86::Load {}
#[cfg(target_arch = "x86_64")]
impl<W: Widen<f32> + x86::Load> Held for W {}

/// A type in which kernels read the rows of w where they lie.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait Held: Widen<f32> {}
#[cfg(not(target_arch = "x86_64"))]
impl<W: Widen<f32>> Held for W {}

/// The product in f32; `finish(row, col, sums)` takes the sums of a row from column `col` on, once for each element.
///
/// `held`: all rows of w one after the other, if they lie so; a few rows of x read them there, without a copy.
pub(super) fn product<W: Held>(
    isa: Isa,
    sizes: Sizes,
    x: impl Rows<f32>,
    (w, held): (impl Rows<f32>, Option<&[W]>),
    finish: impl Fn(usize, usize, &[f32]) + Sync,
) {
    let (w, finish): (_, Finish<'_, f32>) = ((&w as &dyn Rows<f32>, held), &finish);
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512 | IsaLevel::Avx512Bf16 | IsaLevel::Amx => {
            Product::new(x86::Avx512::of(isa), sizes, &x, w, finish).run();
        }
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx2 => Product::new(x86::Avx2::of(isa), sizes, &x, w, finish).run(),
        _ => Product::new(Some(Portable::default()), sizes, &x, w, finish).run(),
    }
}

/// [`product`] in f64.
pub(super) fn product_f64(
    sizes: Sizes,
    x: impl Rows<f64>,
    w: impl Rows<f64>,
    finish: impl Fn(usize, usize, &[f64]) + Sync,
) {
    let w = (&w as &dyn Rows<f64>, None::<&[f64]>);
    Product::new(Some(Portable::default()), sizes, &x, w, &finish).run();
}

/// Elements of a sum that are multiplied at a time, so that those of a few rows of w stay in the first-level cache.
const SLICE: usize = 1024;

/// Elements of the rows of x of a task: they stay in the second-level cache.
const BLOCK: usize = 1 << 17;

/// Elements of the rows of w of a task, and the most of these rows.
const TASK: usize = 1 << 16;
const TASK_ROWS: usize = 96;

/// Elements of x that are packed at a time.
const PACKED: usize = 1 << 23;

/// Tiles of rows of x up to which rows of w are read where they lie: more of them share what is packed.
const TILES_IN_PLACE: usize = 2;

/// Bytes of a row of w up to which kernels prefetch what they read where it lies, and how many bytes ahead: the processor's own
/// prefetch does well only with longer rows.
const SHORT_ROW: usize = 2560;
const AHEAD: usize = 8 << 10;

/// Multiply-adds from which a second thread pays off.
const PARALLEL_WORK: usize = 1 << 19;

/// One product in progress. Compiled for each kernel, whatever gives the rows and takes the sums.
struct Product<'a, K: Tiles, H> {
    kernels: K,
    sizes: Sizes,
    /// Elements from one packed row to the next.
    stride: usize,
    x: &'a dyn Rows<K::Value>,
    w: &'a dyn Rows<K::Value>,
    /// The rows of w, if they are read where they lie. They have no padding.
    held: Option<&'a [H]>,
    finish: Finish<'a, K::Value>,
}

/// Rows of x and rows of w.
#[derive(Clone)]
struct Block {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl<'a, K: Tiles + Adds<H, Sum = <K as Tiles>::Value>, H: Sync> Product<'a, K, H> {
    fn new(
        kernels: Option<K>,
        sizes: Sizes,
        x: &'a dyn Rows<K::Value>,
        (w, held): (&'a dyn Rows<K::Value>, Option<&'a [H]>),
        finish: Finish<'a, K::Value>,
    ) -> Self {
        let padded = sizes.k.next_multiple_of(LANES);
        let in_place = sizes.m <= TILES_IN_PLACE * K::ROWS && padded == sizes.k;
        Self {
            kernels: kernels.expect("an `Isa` of this level has the kernels of this level"),
            sizes,
            // Rows whose distance is a power of two would share few places of the first-level cache.
            stride: padded + if padded.is_multiple_of(256) { LANES } else { 0 },
            x,
            w,
            held: held.filter(|_| in_place),
            finish,
        }
    }

    fn run(&self) {
        let Sizes { m, n, k } = self.sizes;
        if m == 0 || n == 0 {
            return;
        }
        let at_once = (PACKED / self.stride)
            .max(K::ROWS)
            .next_multiple_of(K::ROWS);
        let threads = match m * n * k < PARALLEL_WORK {
            true => 1,
            false => rayon::current_num_threads(),
        };
        let mut values = Scratch::<K::Value>::new(m.min(at_once) * self.stride);
        for first in (0..m).step_by(at_once) {
            let rows = first..m.min(first + at_once);
            self.pack_x(rows.clone(), threads, &mut values);
            let (down, across) = self.task_size(rows.len(), threads);
            let columns = n.div_ceil(across);
            // One after the other, tasks use the same rows of x.
            let task = |task: usize| {
                let (row, col) = (task / columns * down, task % columns * across);
                let block = Block {
                    rows: first + row..rows.end.min(first + row + down),
                    cols: col..n.min(col + across),
                };
                self.block(&block, &values[row * self.stride..]);
            };
            let count = rows.len().div_ceil(down) * columns;
            match threads {
                1 => (0..count).for_each(task),
                _ => tasks::for_each(count, task),
            }
        }
    }

    /// Rows of x and of w of a task. No result depends on them.
    fn task_size(&self, rows: usize, threads: usize) -> (usize, usize) {
        let group = K::COLS;
        let mut across = (TASK / self.stride.max(1)).min(TASK_ROWS).max(group);
        across -= across % group;
        let mut down = (BLOCK / self.stride.max(1)).max(4 * K::ROWS);
        let tasks = |down: usize| rows.div_ceil(down) * self.sizes.n.div_ceil(across);
        while threads > 1 && down > 12 * K::ROWS && tasks(down) < 4 * threads {
            down /= 2;
        }
        let down = rows.div_ceil(rows.div_ceil(down));
        (down.next_multiple_of(K::ROWS), across)
    }

    fn pack_x(&self, rows: Range<usize>, threads: usize, values: &mut [K::Value]) {
        let per_task = (TASK / self.stride.max(1)).max(1);
        let values = Shared::new(values);
        let task = |task: usize| {
            let part = task * per_task..rows.len().min((task + 1) * per_task);
            // SAFETY: each task has its own rows.
            let values = unsafe { values.part(part.start * self.stride..part.end * self.stride) };
            self.pack(
                self.x,
                rows.start + part.start..rows.start + part.end,
                values,
            );
        };
        let count = rows.len().div_ceil(per_task);
        match threads {
            1 => (0..count).for_each(task),
            _ => tasks::for_each(count, task),
        }
    }

    /// Rows of an operand, and zeros after each.
    fn pack(&self, from: &dyn Rows<K::Value>, rows: Range<usize>, values: &mut [K::Value]) {
        let k = self.sizes.k;
        if k == 0 {
            return;
        }
        for row in values.chunks_exact_mut(self.stride) {
            row[k..].fill(K::ZERO);
        }
        from(rows, self.stride, values);
    }

    /// Multiplies and finishes a block; `x` begins with its rows.
    fn block(&self, block: &Block, x: &[K::Value]) {
        let (stride, rows, cols) = (self.stride, block.rows.len(), block.cols.len());
        let padded = self.sizes.k.next_multiple_of(LANES);
        let slices = padded.div_ceil(SLICE).max(1);
        let mut w = Scratch::<K::Value>::new(K::COLS * stride);
        // Lanes wait for the next slice, or are added at once.
        let tile_lanes = K::ROWS * K::COLS * LANES;
        let kept = if slices > 1 {
            rows.div_ceil(K::ROWS) + 1
        } else {
            1
        };
        let mut lanes = Scratch::<K::Value>::new(kept * tile_lanes);
        let mut totals = Scratch::<K::Value>::new(K::ROWS * K::COLS);
        let mut sums = Scratch::<K::Value>::new(rows * cols);
        for group in (0..cols).step_by(K::COLS) {
            let width = K::COLS.min(cols - group);
            let first = block.cols.start + group;
            // The kernels read as many rows as a tile has, which the last group may lack.
            let held = self.held.filter(|_| width == K::COLS);
            let held = held.map(|held| &held[first * self.sizes.k..(first + width) * self.sizes.k]);
            if held.is_none() {
                let (some, rest) = w.split_at_mut(width * stride);
                self.pack(self.w, first..first + width, some);
                // Missing rows give results that are dropped.
                rest.fill(K::ZERO);
            }
            for slice in 0..slices {
                let start = slice * SLICE;
                let steps = (padded - start).min(SLICE) / LANES;
                let (mut row, mut tile) = (0, 0);
                while row < rows {
                    let left = rows - row;
                    // Tiles of about the same height.
                    let height = left.div_ceil(left.div_ceil(K::ROWS));
                    let at = if slices > 1 { tile * tile_lanes } else { 0 };
                    let lanes = &mut lanes[at..at + height * K::COLS * LANES];
                    let x = (&x[(row * stride + start).min(x.len())..], stride);
                    match held {
                        Some(held) => {
                            let k = self.sizes.k;
                            let w = Weights {
                                values: &held[start.min(held.len())..],
                                stride: k,
                                // The first tile reads them from memory.
                                ahead: match row == 0 && k * size_of::<H>() <= SHORT_ROW {
                                    true => AHEAD / size_of::<H>(),
                                    false => 0,
                                },
                            };
                            self.kernels.add(height, x, w, steps, lanes, slice > 0);
                        }
                        None => {
                            let w = Weights {
                                values: &w[start.min(w.len())..],
                                stride,
                                ahead: 0,
                            };
                            self.kernels.add(height, x, w, steps, lanes, slice > 0);
                        }
                    }
                    if slice + 1 == slices {
                        let totals = &mut totals[..height * K::COLS];
                        self.kernels.total(lanes, totals);
                        let totals = totals.chunks_exact(K::COLS);
                        for (totals, sums) in totals.zip(sums[row * cols..].chunks_mut(cols)) {
                            sums[group..group + width].copy_from_slice(&totals[..width]);
                        }
                    }
                    (row, tile) = (row + height, tile + 1);
                }
            }
        }
        for (row, sums) in block.rows.clone().zip(sums.chunks_exact(cols)) {
            (self.finish)(row, block.cols.start, sums);
        }
    }
}
