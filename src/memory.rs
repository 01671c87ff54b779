//! Memory that was freed is kept for what comes next.

/// Lets this process keep the memory that it frees, until it ends. Call it first in `main`; true if it took effect.
///
/// A training step makes and drops the same tensors as the step before. The allocator of glibc gives large ones back to the
/// system each time, and the next step pays for fresh pages: up to half of its time again. The price of keeping them is
/// that the process stays as large as it once was, and that all threads allocate from one heap, which locks for what
/// does not fit into their own small caches.
///
/// Nothing happens, and the answer is false, where the system's C library is not glibc (other allocators can be had as
/// the program's `#[global_allocator]`), and where other threads run already: glibc's settings are read without a lock.
/// With an async runtime, call it before the runtime starts.
///
/// ```no_run
/// fp8::keep_freed_memory(); // the first line of main
/// ```
pub fn keep_freed_memory() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        if threads != 1 {
            return false;
        }
        // SAFETY: this is the only thread, so nobody reads the settings while they change; the values are within the
        // ranges that `mallopt` documents.
        unsafe {
            // One heap for all threads, as theirs cannot hold a block of more than 64 MB and go back piece by piece;
            // no block in a mapping of its own; a heap that never shrinks.
            libc::mallopt(libc::M_ARENA_MAX, 1) == 1
                && libc::mallopt(libc::M_MMAP_MAX, 0) == 1
                && libc::mallopt(libc::M_TRIM_THRESHOLD, -1) == 1
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    false
}
