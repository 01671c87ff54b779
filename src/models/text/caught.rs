//! Calls into crates that panic on malformed files.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call`; a panic becomes an error with its message, and is not printed. The caller discards whatever `call` has changed.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    silence();
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    QUIET.set(before);
    result.map_err(|panic| message(&*panic))
}

/// Installs, once, a panic hook that forwards all panics except those inside [`caught`] to the previous hook.
fn silence() {
    static HOOK: Once = Once::new();
    // A panicking thread must not change the hook.
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
