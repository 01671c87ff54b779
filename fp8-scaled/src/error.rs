//! The errors of this crate.

pub use fp8_candle::{Error, Result};

/// Returns [`Error::Internal`] with a formatted message.
macro_rules! internal {
    ($($arg:tt)*) => {
        return Err($crate::error::Error::Internal(format!($($arg)*)))
    };
}
pub(crate) use internal;
