//! What a session has used, and the warnings of what stayed in high precision there although its guards compute in FP8. Each warning is
//! given once per process.

use crate::warning::warn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// How many names a warning gives.
const NAMED: usize = 3;

/// What the guards of a session have used, in any of its steps.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Whether a prepared layer or operator was used.
    prepared: AtomicBool,
    /// Whether a layer with FP8 codes of a file was used.
    served: AtomicBool,
    /// Layers that no preparation has seen.
    unseen: Names,
    /// Layers that a preparation has left out. Its report names them, so they matter only where nothing is cast.
    left_out: Names,
    /// Operators that no preparation has taken or left out, under recipes that cast operators.
    operators: Names,
}

impl Uses {
    pub(super) fn note_prepared(&self) {
        self.prepared.store(true, Ordering::Relaxed);
    }

    pub(super) fn note_served(&self) {
        self.served.store(true, Ordering::Relaxed);
    }

    /// Records that a layer without FP8 state computes in high precision.
    pub(super) fn note_layer(&self, path: Option<&str>, left_out: bool) {
        match left_out {
            false => self.unseen.note(path),
            true if !self.casts() => self.left_out.note(path),
            true => {}
        }
    }

    /// Records that an operator that the recipe would cast computes in high precision.
    pub(super) fn note_operator(&self, path: Option<&str>) {
        self.operators.note(path);
    }

    fn casts(&self) -> bool {
        let flags = [&self.prepared, &self.served];
        flags.iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Gives the warnings, at the end of a step; `expected` says whether the session should have cast something by itself.
    pub(super) fn warn(&self, expected: bool) {
        let prepared = self.prepared.load(Ordering::Relaxed);
        match (self.unseen.list(), self.casts()) {
            (names, false) if expected => warn_of_nothing(names.as_deref(), self.left_out.list()),
            // Without prepared layers beside it, a layer is in high precision because the file of a served model says so.
            (Some(names), true) if prepared => warn_of_layers(&names),
            _ => {}
        }
        // A model that is only served has no operators to prepare either.
        let only_served = self.served.load(Ordering::Relaxed) && !prepared;
        if let Some(names) = self.operators.list().filter(|_| !only_served) {
            warn_of_operators(&names);
        }
    }
}

/// The first paths of layers or operators; None for one without a path.
#[derive(Debug, Default)]
struct Names(Mutex<Vec<Option<String>>>);

impl Names {
    fn note(&self, path: Option<&str>) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One more than a warning gives, so that it knows whether there are more.
        if names.len() <= NAMED && !names.iter().any(|known| known.as_deref() == path) {
            names.push(path.map(str::to_string));
        }
    }

    /// The names as a warning gives them; None without any.
    fn list(&self) -> Option<String> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shown = names.iter().take(NAMED).map(|name| match name {
            Some(path) => format!("`{path}`"),
            None => "one without a path".to_string(),
        });
        let mut shown: Vec<_> = shown.collect();
        if names.len() > NAMED {
            shown.push("..".to_string());
        }
        (!shown.is_empty()).then(|| shown.join(", "))
    }
}

/// Says `text` unless that was said before.
fn once(said: &AtomicBool, text: impl FnOnce() -> String) {
    if !said.swap(true, Ordering::Relaxed) {
        warn(&text());
    }
}

/// Warns that an enabled guard cast nothing.
fn warn_of_nothing(unseen: Option<&str>, left_out: Option<String>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    once(&SAID, || {
        let why = match (unseen, left_out) {
            (Some(names), _) => format!(
                "layers ran in high precision because they are not prepared ({names}): call prepare_fp8; its report lists every layer"
            ),
            (None, Some(names)) => {
                format!("prepare_fp8 has left out the layers that ran in it ({names}); its report says why")
            }
            (None, None) => "no layer of this library ran in it: is the guard bound to a name (`let _guard = ..`, not `let _ = ..`), does \
                             the forward pass run on the guard's thread (else take a handle), are the layers those of `nn` (those of \
                             candle_nn have no FP8)?"
                .to_string(),
        };
        format!("an enabled FP8 autocast guard was closed without any FP8; {why}")
    });
}

/// Warns of layers beside prepared ones that no report names.
fn warn_of_layers(names: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    once(&SAID, || {
        format!(
            "layers that prepare_fp8 has not seen ran in high precision inside an FP8 autocast guard, beside prepared ones ({names}): are they \
             in a closure or a field with #[fp8(skip)], or were they made after it? If that is intended, say so with prepare_fp8 and \
             PrepareOptions::with_off, or call them outside of the guard"
        )
    });
}

/// Warns of operators that are not prepared.
fn warn_of_operators(names: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    once(&SAID, || {
        format!(
            "the recipe of an FP8 autocast guard casts operators too, but some ran in high precision because they are not prepared ({names}): \
             call prepare_fp8 with PrepareOptions::with_operators(true), and with_off for those that should stay in high \
             precision"
        )
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_gives_three_names_and_says_whether_there_are_more() {
        let names = Names::default();
        assert_eq!(names.list(), None);
        for path in [Some("a"), None, Some("a"), Some("b")] {
            names.note(path);
        }
        assert_eq!(names.list().unwrap(), "`a`, one without a path, `b`");
        for path in [Some("c"), Some("d")] {
            names.note(path);
        }
        assert_eq!(names.list().unwrap(), "`a`, one without a path, `b`, ..");
    }
}
