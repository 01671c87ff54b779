//! What a template may still create and read.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of all strings and lists that a template creates, and of its output.
const MAKE: u64 = 256 << 20;
/// Values that may be visited; [`BYTES_PER_STEP`] bytes of a string count as one.
const STEPS: u64 = 150_000_000;
const BYTES_PER_STEP: u64 = 32;
/// Bytes of one string or list with its contents.
const MAX_SIZE: u64 = 32 << 20;
/// Nesting of lists.
const MAX_DEPTH: usize = 64;
/// Bytes of a list element, besides those of its string.
const ELEMENT: u64 = 32;

/// Counts down while a template runs. Each method fails once its count is used up.
#[derive(Clone)]
pub(super) struct Budget(Arc<Left>);

struct Left {
    make: AtomicU64,
    steps: AtomicU64,
}

impl Budget {
    pub fn new() -> Self {
        Self(Arc::new(Left {
            make: AtomicU64::new(MAKE),
            steps: AtomicU64::new(STEPS),
        }))
    }

    /// Accounts for `bytes` that are about to be created, or just were.
    pub fn make(&self, bytes: u64) -> Result<(), Error> {
        take(&self.0.make, bytes, || {
            format!("the template makes more than {MAKE} bytes of text")
        })
    }

    fn steps(&self, steps: u64) -> Result<(), Error> {
        take(&self.0.steps, steps, || {
            format!("the template looks at more than {STEPS} values")
        })
    }

    /// Bytes of a value with its contents, counted as often as they occur. Engine functions that traverse a value get only values that
    /// pass this check; others would make them run forever or overflow their stack.
    pub fn size(&self, value: &Value) -> Result<u64, Error> {
        let size = self.within(value, 0, 0)?;
        self.steps(size / BYTES_PER_STEP)?;
        Ok(size)
    }

    /// The size of a value nested in `depth` others, which have `before` bytes so far.
    fn within(&self, value: &Value, depth: usize, before: u64) -> Result<u64, Error> {
        self.steps(1)?;
        if depth > MAX_DEPTH {
            return Err(refused(format!(
                "a value has lists in lists, or holds itself, beyond {MAX_DEPTH} levels"
            )));
        }
        let mut size = own_size(value);
        let mut add = |part: &Value| {
            size += self.within(part, depth + 1, before + size)?;
            Ok::<_, Error>(())
        };
        match value.kind() {
            ValueKind::Map => {
                if let Some(pairs) = value.as_object().and_then(|map| map.try_iter_pairs()) {
                    for (key, value) in pairs {
                        add(&key)?;
                        add(&value)?;
                    }
                }
            }
            ValueKind::Seq | ValueKind::Iterable => {
                for element in value.try_iter()?.checked() {
                    add(&element?)?;
                }
            }
            _ => {}
        }
        match before + size > MAX_SIZE {
            true => Err(too_large()),
            false => Ok(size),
        }
    }

    /// Bytes of a value alone: a string, or a list without what its elements refer to.
    pub fn shallow(&self, value: &Value) -> Result<u64, Error> {
        let elements = match value.kind() {
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => match value.len() {
                Some(len) => len as u64,
                None => {
                    let mut count = 0;
                    for element in value.try_iter()?.checked() {
                        element?;
                        self.steps(1)?;
                        count += 1;
                    }
                    count
                }
            },
            _ => 0,
        };
        let size = own_size(value).saturating_add(elements.saturating_mul(ELEMENT));
        if size > MAX_SIZE {
            return Err(too_large());
        }
        self.steps(elements + size / BYTES_PER_STEP)?;
        Ok(size)
    }
}

fn own_size(value: &Value) -> u64 {
    ELEMENT + value.as_bytes().map_or(0, |text| text.len() as u64)
}

fn take(left: &AtomicU64, amount: u64, reason: impl FnOnce() -> String) -> Result<(), Error> {
    let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        left.checked_sub(amount)
    });
    taken.map(|_| ()).map_err(|_| refused(reason()))
}

fn too_large() -> Error {
    refused(format!(
        "a text or list of the template has more than {MAX_SIZE} bytes"
    ))
}

/// The error for an exceeded bound.
pub(super) fn refused(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
