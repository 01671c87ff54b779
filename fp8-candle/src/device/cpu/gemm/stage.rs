//! The results of sums that tiles have written to memory: finished row by row and, if they do not stay in the caches anyway, written past
//! them in whole lines, however the columns of a task are cut.

use super::super::scratch::{LINE, Scratch};
use super::epilogue::Epilogue;
use crate::base::parallel::shared::Shared;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Room of a task for results of one row at a time, and for the cache line that its earlier columns have begun in each row.
pub(super) struct Stage {
    row: Scratch<u16>,
    begun: Scratch<u16>,
    past_caches: bool,
}

/// The sums of a block, and where their results belong.
pub(super) struct Finished<'a, T> {
    pub(super) epilogue: &'a Epilogue<'a>,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
    /// Rows are `stride` apart.
    pub(super) sums: &'a [f32],
    pub(super) stride: usize,
    /// All results, in rows of `n`.
    pub(super) out: Shared<'a, MaybeUninit<T>>,
    pub(super) n: usize,
    /// The columns of the task, which alone writes to them and to these rows.
    pub(super) of_task: Range<usize>,
    pub(super) stage: Option<&'a mut Stage>,
}

impl<T> Finished<'_, T> {
    /// Finishes each row with `finish`: its index, the first column, the sums, and the results.
    #[inline(always)]
    pub(super) fn with(
        &mut self,
        mut finish: impl FnMut(usize, usize, &[f32], &mut [MaybeUninit<T>]),
    ) {
        let Self { cols, of_task, .. } = self;
        let first = cols.start;
        let in_task = cols.start - of_task.start..cols.end - of_task.start;
        let sums = self.sums.chunks_exact(self.stride);
        for (index, (row, sums)) in self.rows.clone().zip(sums).enumerate() {
            let of_row = row * self.n + of_task.start..row * self.n + of_task.end;
            // SAFETY: each task has its own rows and columns.
            let out = unsafe { self.out.part(of_row) };
            let sums = &sums[..in_task.len()];
            match &mut self.stage {
                Some(stage) => {
                    stage.write(
                        index,
                        out,
                        in_task.clone(),
                        #[inline(always)]
                        |out| finish(row, first, sums, out),
                    );
                }
                None => finish(row, first, sums, &mut out[in_task.clone()]),
            }
        }
    }
}

impl Stage {
    /// For this number of rows, and up to `cols` columns at a time with elements of `element` bytes. `past_caches`: whether to write past the
    /// caches; a line is not read then before it is written.
    pub(super) fn new(rows: usize, cols: usize, element: usize, past_caches: bool) -> Self {
        let len = LINE + cols * element + LINE;
        Self {
            row: Scratch::new(len.div_ceil(size_of::<u16>())),
            begun: Scratch::new(rows * LINE / size_of::<u16>()),
            past_caches,
        }
    }

    /// Writes columns `cols` of row `index` of the task, which `make` computes. `of_task`: the whole row, whose columns are written from
    /// left to right.
    ///
    /// The task calls [`finish`] at its end.
    #[inline(always)]
    fn write<T>(
        &mut self,
        index: usize,
        of_task: &mut [MaybeUninit<T>],
        cols: Range<usize>,
        make: impl FnOnce(&mut [MaybeUninit<T>]),
    ) {
        if !self.past_caches {
            return make(&mut of_task[cols]);
        }
        let (first, last) = (cols.start == 0, cols.end == of_task.len());
        let len = size_of_val(&of_task[cols.clone()]);
        assert!(LINE + len + LINE <= size_of_val(&*self.row) && (last || len >= LINE));
        let begun = &mut self.begun[index * LINE / size_of::<u16>()..][..LINE / size_of::<u16>()];
        let begun = begun.as_mut_ptr().cast::<u8>();
        // Of the whole row, since earlier columns are written, too.
        let to = of_task.as_mut_ptr().wrapping_add(cols.start).cast::<u8>();
        let before = if first { 0 } else { to.addr() % LINE };
        let after = if last { 0 } else { (to.addr() + len) % LINE };
        // SAFETY: the room holds `len` bytes between two lines, and is aligned to a line. `before`, less than a line, bytes of the task's row
        // lie before `to`: those of earlier columns are a line at least, by the assertion when they were written. `after` is less than `len`.
        unsafe {
            let room = self.row.as_mut_ptr().cast::<u8>().add(LINE);
            let start = room.sub(before);
            // Whole lines, since copies of unknown length are calls; what lies behind the bytes that are needed is overwritten, or ignored.
            start.copy_from_nonoverlapping(begun, LINE);
            make(std::slice::from_raw_parts_mut(room.cast(), cols.len()));
            let bytes = before + len - after;
            copy(start, to.sub(before), bytes);
            begun.copy_from_nonoverlapping(start.add(bytes), LINE);
        }
    }
}

/// Copies bytes, whole cache lines of `to` past the caches.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let head = to.align_offset(LINE).min(bytes);
    let rest = head + (bytes - head) / LINE * LINE;
    // SAFETY: the three parts are within what the caller guarantees, and lines are aligned.
    unsafe {
        if head > 0 {
            to.copy_from_nonoverlapping(from, head);
        }
        for at in (head..rest).step_by(LINE) {
            write_line(from.add(at), to.add(at));
        }
        if rest < bytes {
            to.add(rest)
                .copy_from_nonoverlapping(from.add(rest), bytes - rest);
        }
    }
}

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`] of a line; `to` is aligned to one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn write_line(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..LINE).step_by(size_of::<__m128i>()) {
        // SAFETY: a part of the line.
        unsafe { _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast())) };
    }
}

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`] of a line.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn write_line(from: *const u8, to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe { to.copy_from_nonoverlapping(from, LINE) };
}

/// Makes what this thread has written past the caches visible to threads that it wakes or answers.
pub(super) fn finish() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_written_wherever_they_lie() {
        const ROWS: usize = 3;
        for (skipped, n, of_task) in [
            (0, 128, 0..128),
            (8, 100, 0..100),
            (5, 131, 0..131),
            (3, 131, 32..131),
            (31, 200, 64..192),
            (1, 70, 0..32),
        ] {
            let mut all = vec![0u16; skipped + ROWS * n];
            let mut expected = all.clone();
            let mut stage = Stage::new(ROWS, 64, size_of::<u16>(), true);
            for from in (of_task.start..of_task.end).step_by(64) {
                let cols = from..of_task.end.min(from + 64);
                let values = |row: usize, col: usize| (1 + row * n + col) as u16;
                for row in 0..ROWS {
                    let start = skipped + row * n;
                    for col in cols.clone() {
                        expected[start + col] = values(row, col);
                    }
                    let out: &mut [u16] = &mut all[start + of_task.start..start + of_task.end];
                    // SAFETY: initialized values may be overwritten by others.
                    let out = unsafe { &mut *(out as *mut [u16] as *mut [MaybeUninit<u16>]) };
                    let in_task = cols.start - of_task.start..cols.end - of_task.start;
                    stage.write(row, out, in_task, |out: &mut [MaybeUninit<u16>]| {
                        for (col, out) in cols.clone().zip(out) {
                            out.write(values(row, col));
                        }
                    });
                }
            }
            finish();
            assert_eq!(all, expected, "{skipped} {n} {of_task:?}");
        }
    }
}
