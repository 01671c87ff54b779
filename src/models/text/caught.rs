//! Calls of crates that panic on what a file holds.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns, or the message of its panic, which is not printed. The caller gives up what `call` has changed.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    silence();
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    QUIET.set(before);
    result.map_err(|panic| message(&*panic))
}

/// Puts a hook before the program's own, once, which passes on all panics but those inside of [`caught`].
fn silence() {
    static HOOK: Once = Once::new();
    // A thread that panics may not change hooks.
    if std::thread::panicking() {
        return;
    }
    HOOK.call_once(|| {
        let hook = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                hook(panic);
            }
        }));
    });
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use super::caught;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(
            caught(|| panic!("no token")),
            Err::<(), _>("no token".into())
        );
        let index = [1, 2].len() + 1;
        let error = caught(|| vec![0; 2][index]).expect_err("no such element");
        assert!(error.contains("index is 3"), "{error}");
    }
}
