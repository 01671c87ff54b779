//! Slices of floats to f32 and f16.

use half::f16;

use super::{Isa, LANES, is_in, load, padded, store};
use crate::HighPrecision;

/// See `kernels::halves`.
pub(in super::super) fn widen<T: HighPrecision>(isa: Isa, src: &[T], dst: &mut [f32]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: an `Isa` of this level exists only where NEON was found.
    unsafe { convert(src, dst) }
}

/// See `kernels::halves`.
pub(in super::super) fn narrow_f16(isa: Isa, src: &[f32], dst: &mut [f16]) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as above.
    unsafe { convert(src, dst) }
}

/// From one type to another by way of f32, as many elements as both slices have.
#[target_feature(enable = "neon")]
fn convert<T: HighPrecision, U: HighPrecision>(src: &[T], dst: &mut [U]) {
    let len = src.len().min(dst.len());
    let (src, rest) = src[..len].as_chunks::<LANES>();
    let (dst, dst_rest) = dst[..len].as_chunks_mut::<LANES>();
    for (src, dst) in src.iter().zip(dst) {
        store(&load(src), dst);
    }
    if !rest.is_empty() {
        let mut values = [U::default(); LANES];
        store(&load(&padded(rest)), &mut values);
        dst_rest.copy_from_slice(&values[..dst_rest.len()]);
    }
}
