//! Results written past the caches.

#[cfg(target_arch = "x86_64")]
use super::layout::PANEL;
use crate::base::parallel::shared::Shared;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// For results that are written past the caches. That takes whole cache lines, so the end of each row of a panel waits for the next
/// panel if both share a line.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    /// The last [`STREAM_PER_ROW`] results of each row in the panel before.
    pub(super) ends: Shared<'a, f32>,
    /// The row of the results that the first of them belong to.
    pub(super) row: usize,
    /// The first column of the task, and the one after its last.
    pub(super) cols: [usize; 2],
}

/// Results that each row keeps for the next panel: a cache line.
pub(super) const STREAM_PER_ROW: usize = 16;

#[cfg(target_arch = "x86_64")]
impl Stream<'_> {
    /// Writes the columns from `col` on of a row: the lanes of `masks`, from `out` on.
    ///
    /// # Safety
    /// `out` points to as many elements as there are lanes, and behind those of the panel before if there is one. No other task uses any
    /// of them, nor `ends`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,avx512bf16")]
    pub(super) unsafe fn write(
        self,
        [row, col]: [usize; 2],
        out: *mut f32,
        values: [__m512; 2],
        masks: [__mmask16; 2],
    ) {
        const LINE: usize = STREAM_PER_ROW;
        let (before, after) = (col > self.cols[0], col + PANEL < self.cols[1]);
        let at = (row - self.row) * LINE;
        // SAFETY: guaranteed by the caller.
        let ends = unsafe { self.ends.part(at..at + LINE) }.as_mut_ptr();
        // How much of its first cache line lies before the panel. Addresses of f32 are multiples of four.
        let waiting = out.addr() / 4 % LINE;
        let line = out.wrapping_sub(waiting);
        let from = _mm512_add_epi32(
            _mm512_set1_epi32((LINE - waiting) as i32),
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        );
        let join = |left, right| _mm512_permutex2var_ps(left, from, right);
        let first_lanes = |count: usize| ((1u32 << count) - 1) as __mmask16;
        // SAFETY: the elements of the panel before, its own and its line of `ends`, each within its mask.
        unsafe {
            let ended = if before {
                _mm512_loadu_ps(ends)
            } else {
                values[0]
            };
            if masks != [!0; 2] {
                if before {
                    let ended = join(ended, values[0]);
                    _mm512_mask_storeu_ps(line, first_lanes(waiting), ended);
                }
                _mm512_mask_storeu_ps(out, masks[0], values[0]);
                _mm512_mask_storeu_ps(out.wrapping_add(LINE), masks[1], values[1]);
                return;
            }
            if before || waiting == 0 {
                _mm512_stream_ps(line, join(ended, values[0]));
            } else {
                _mm512_mask_storeu_ps(out, first_lanes(LINE - waiting), values[0]);
            }
            _mm512_stream_ps(line.wrapping_add(LINE), join(values[0], values[1]));
            if after {
                _mm512_storeu_ps(ends, values[1]);
            } else {
                let rest = join(values[1], values[1]);
                _mm512_mask_storeu_ps(line.wrapping_add(2 * LINE), first_lanes(waiting), rest);
            }
        }
    }
}

/// Makes everything that this thread has [streamed](super::results::Block::stream) visible to threads that it wakes or answers.
pub(super) fn streamed() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        _mm_sfence();
    }
}
