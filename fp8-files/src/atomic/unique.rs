//! Names of temporary files and directories: `PREFIX` and `PROCESS-COUNT`.

use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A name with this prefix that no other call returns.
pub(crate) fn unique(prefix: impl Into<OsString>) -> OsString {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut name = prefix.into();
    name.push(format!("{}-{count}", process_token()));
    name
}

/// Whether [`unique`] made `name` from `prefix`, in any process.
pub(crate) fn is_unique(name: &OsStr, prefix: &OsStr) -> bool {
    token(name, prefix).is_some()
}

/// Whether [`unique`] made `name` from `prefix` in another process.
pub(super) fn is_of_another_process(name: &OsStr, prefix: &OsStr) -> bool {
    token(name, prefix).is_some_and(|token| token != process_token())
}

/// The process that made `name` from `prefix`.
fn token<'a>(name: &'a OsStr, prefix: &OsStr) -> Option<&'a str> {
    let name = name.as_encoded_bytes();
    let rest = name.strip_prefix(prefix.as_encoded_bytes())?;
    let (token, count) = std::str::from_utf8(rest).ok()?.split_once('-')?;
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_hexdigit());
    (is_hex(token) && is_hex(count)).then_some(token)
}

/// Identifies this process among all earlier ones, also where process numbers repeat (containers).
fn process_token() -> &'static str {
    static TOKEN: OnceLock<String> = OnceLock::new();
    TOKEN.get_or_init(|| {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        format!("{:x}{:x}", std::process::id(), since_epoch.as_nanos())
    })
}
