//! Memory that is needed soon.

/// Asks the processor to bring values into its first-level cache while it computes other things. Where it cannot be asked, nothing happens.
#[inline]
pub fn prefetch<T>(values: &[T]) {
    const LINE: usize = 64;
    for offset in (0..size_of_val(values)).step_by(LINE) {
        prefetch_line(values.as_ptr().wrapping_byte_add(offset));
    }
}

/// [`prefetch`] of the cache line of an address, which need not be valid.
#[inline(always)]
pub fn prefetch_line<T>(address: *const T) {
    // SAFETY: every x86-64 processor has the instruction, which reads nothing that the program can see and cannot fail.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    // SAFETY: as above, for every aarch64 processor.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri)))))]
    let _ = address;
}
