//! A row of a narrow panel in NEON: sixteen columns in four vectors. Each function names its vectors one by one and is always
//! inlined, so that the compiler keeps arrays of rows in registers. What a function with target features calls is not always
//! inlined, so these have none.

use super::layout::NARROW_PANEL;
use std::arch::aarch64::*;

/// Sixteen columns.
pub(super) type Row = [float32x4_t; 4];

const _: () = assert!(size_of::<Row>() == NARROW_PANEL * size_of::<f32>());

/// # Safety
/// The processor must have NEON.
#[inline(always)]
pub(super) unsafe fn zeros() -> Row {
    // SAFETY: the caller guarantees it.
    unsafe { [vdupq_n_f32(0.); 4] }
}

/// # Safety
/// The processor must have NEON, and there must be sixteen numbers to read.
#[inline(always)]
pub(super) unsafe fn load(from: *const f32) -> Row {
    // SAFETY: the caller guarantees both.
    unsafe {
        [
            vld1q_f32(from),
            vld1q_f32(from.add(4)),
            vld1q_f32(from.add(8)),
            vld1q_f32(from.add(12)),
        ]
    }
}

/// # Safety
/// The processor must have NEON, and there must be place for sixteen numbers.
#[inline(always)]
pub(super) unsafe fn store(row: Row, to: *mut f32) {
    // SAFETY: the caller guarantees both.
    unsafe {
        vst1q_f32(to, row[0]);
        vst1q_f32(to.add(4), row[1]);
        vst1q_f32(to.add(8), row[2]);
        vst1q_f32(to.add(12), row[3]);
    }
}

/// # Safety
/// The processor must have NEON.
#[inline(always)]
pub(super) unsafe fn multiply(row: Row, factor: f32) -> Row {
    // SAFETY: the caller guarantees it.
    unsafe {
        [
            vmulq_n_f32(row[0], factor),
            vmulq_n_f32(row[1], factor),
            vmulq_n_f32(row[2], factor),
            vmulq_n_f32(row[3], factor),
        ]
    }
}

/// `sums + values * a`, each rounded once.
///
/// # Safety
/// The processor must have NEON.
#[inline(always)]
pub(super) unsafe fn multiply_add(sums: Row, values: Row, a: f32) -> Row {
    // SAFETY: the caller guarantees it.
    unsafe {
        [
            vfmaq_n_f32(sums[0], values[0], a),
            vfmaq_n_f32(sums[1], values[1], a),
            vfmaq_n_f32(sums[2], values[2], a),
            vfmaq_n_f32(sums[3], values[3], a),
        ]
    }
}
