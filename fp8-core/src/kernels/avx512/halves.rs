//! Slices of floats to f32 and f16.

use half::f16;

use super::{Isa, LANES, is_in, load, store};
use crate::HighPrecision;

/// As `kernels::halves` says.
pub(in super::super) fn widen<T: HighPrecision>(isa: Isa, src: &[T], dst: &mut [f32]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { convert(src, dst) }
}

/// As `kernels::halves` says.
pub(in super::super) fn narrow_f16(isa: Isa, src: &[f32], dst: &mut [f16]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { convert(src, dst) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn convert<T: HighPrecision, U: HighPrecision>(src: &[T], dst: &mut [U]) {
    let len = src.len().min(dst.len());
    let (src, dst) = (&src[..len], &mut dst[..len]);
    for start in (0..len).step_by(LANES) {
        store(dst, start, load(src, start));
    }
}
