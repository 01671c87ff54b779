//! The warning about an enabled guard that cast nothing.

use crate::warning::warn;
use std::sync::atomic::{AtomicBool, Ordering};

/// How many unprepared layers the warning names.
pub(super) const NAMED: usize = 3;

/// Warns once per process that an enabled guard cast nothing.
pub(super) fn warn_of_nothing(unprepared: &[String]) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return;
    }
    let why = match unprepared {
        [] => "no layer of this library ran in it: is the guard bound to a name (`let _guard = ..`, not `let _ = ..`), does the forward \
               pass run on the guard's thread (else take a handle), are the layers those of `nn` (those of candle_nn have no FP8)?"
            .to_string(),
        names => format!(
            "layers ran in high precision because they are not prepared (`{}`{}): call prepare_fp8; its report lists every layer",
            names.join("`, `"),
            if names.len() == NAMED { ", .." } else { "" },
        ),
    };
    warn(&format!(
        "an enabled FP8 autocast guard was closed without any FP8; {why}"
    ));
}
