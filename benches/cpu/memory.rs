//! Memory that is used again, as in a program with an allocator that keeps what was freed.

/// Keeps glibc from giving freed memory back to the system: otherwise every large output of every contestant pays for
/// fresh pages, which take longer than the product itself.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` may be called at any time; the values are within the ranges that it documents.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}
