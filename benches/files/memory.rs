//! The most memory that one piece of work has.

/// Begins to measure again. Only Linux can; elsewhere the peak is that of the whole run.
pub fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory since then, in words.
pub fn peak() -> String {
    match fp8::memory_in_use() {
        Some(used) => format!("{:.2} GB", used.peak as f64 / 1e9),
        None => "unknown".into(),
    }
}
