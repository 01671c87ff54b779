//! Memory of this process: keeps what is freed for later allocations, and says how much is in use.

/// Makes this process keep the memory that it frees. Call it first in `main`; returns true if it took effect.
///
/// A training step makes and drops the same tensors as the step before. The allocator of glibc gives large ones back to the
/// system each time, and the next step takes up to 1.5 times as long because it pays for fresh pages. In return the
/// process never shrinks, and all threads allocate from one heap, which takes a lock for blocks that do not fit into
/// their own small caches.
///
/// It also asks for huge pages for this heap, up to half of the machine's memory: a step then waits less for addresses to be translated.
/// Memory is still used only as far as it is written to, but in pieces of 2 MiB. Linux gives them if
/// `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or `always`.
///
/// Does nothing and returns false if the system's C library is not glibc (a program can choose another allocator as its
/// `#[global_allocator]`), or if other threads are running: glibc reads these settings without a lock. With an async
/// runtime, call it before the runtime starts.
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
        // SAFETY: this is the only thread, so no other one reads the settings while they change; the values are within
        // the ranges that `mallopt` documents.
        let keeps = unsafe {
            // One heap for all threads: heaps of single threads are limited to blocks of 64 MB and shrink. No block in a
            // mapping of its own, which would be unmapped when freed. And the heap never shrinks.
            libc::mallopt(libc::M_ARENA_MAX, 1) == 1
                && libc::mallopt(libc::M_MMAP_MAX, 0) == 1
                && libc::mallopt(libc::M_TRIM_THRESHOLD, -1) == 1
        };
        if keeps {
            ask_for_huge_pages();
        }
        keeps
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    false
}

/// Asks for huge pages for the heap, whose memory is never given back: it is made as large as it may become, and the advice stays with the
/// addresses. Where the system refuses, nothing changes.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn ask_for_huge_pages() {
    const HUGE: usize = 2 << 20;
    // SAFETY: these have no conditions.
    let of_machine = unsafe {
        [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| usize::try_from(libc::sysconf(name)))
    };
    let [Ok(pages), Ok(size)] = of_machine else {
        return;
    };
    let bytes = pages.saturating_mul(size) / 2;
    // SAFETY: no byte of the block is touched, the advice is for whole pages within it and changes no contents, and it is freed once.
    unsafe {
        let block = libc::malloc(bytes);
        if block.is_null() {
            return;
        }
        let skipped = block.align_offset(HUGE);
        if let Some(rest) = bytes.checked_sub(skipped) {
            let start = block.wrapping_byte_add(skipped);
            libc::madvise(start, rest / HUGE * HUGE, libc::MADV_HUGEPAGE);
        }
        libc::free(block);
    }
}

/// Memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInUse {
    /// Bytes in memory now.
    pub resident: u64,
    /// The most bytes that were in memory at a time.
    pub peak: u64,
}

/// The memory that this process uses, from the system's own count; None where the system has no `/proc/self/status`.
///
/// ```
/// if let Some(used) = fp8::memory_in_use() {
///     assert!(used.peak >= used.resident);
/// }
/// ```
pub fn memory_in_use() -> Option<MemoryInUse> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let bytes = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    };
    // The peak is counted in larger steps than the present use.
    let resident = bytes("VmRSS:")?;
    let peak = bytes("VmHWM:")?.max(resident);
    Some(MemoryInUse { resident, peak })
}
