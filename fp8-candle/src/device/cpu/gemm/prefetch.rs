//! Prefetches of addresses that need not be valid: they read nothing and cannot fail.

/// Into the first-level cache.
#[inline(always)]
pub(super) fn near<T>(address: *const T) {
    // SAFETY: every x86-64 processor has the instruction, which cannot fail.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}

/// Into the second-level cache.
#[inline(always)]
pub(super) fn far<T>(address: *const T) {
    // SAFETY: every x86-64 processor has the instruction, which cannot fail.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}
