//! The limits of a server.

use super::error::ServingError;
use fp8_core::setters;

/// How many requests a [`Server`](super::Server) runs at once, how many may wait, and what their caches may hold.
///
/// ```
/// use fp8::serving::ServerOptions;
///
/// let options = ServerOptions::default().with_max_running(4).with_max_cache_bytes(Some(1 << 30));
/// assert_eq!(options.max_waiting, 64);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Requests that are computed together; 8 by default, as many as one pass over the weights serves.
    pub max_running: usize,
    /// Requests that may wait for their turn; 64 by default. One more is refused with [`ServingError::QueueFull`].
    pub max_waiting: usize,
    /// Tokens of prompts that are read between two new tokens of the other requests; 32 by default. More of them make reading a little
    /// faster, and everything else, a cancellation included, wait longer.
    pub prompt_part: usize,
    /// Bytes that the keys and values of all running requests may hold together, each counted at its largest possible length;
    /// without a limit by default. A request waits until there is room for it.
    pub max_cache_bytes: Option<usize>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_running: 8,
            max_waiting: 64,
            prompt_part: 32,
            max_cache_bytes: None,
        }
    }
}

setters! { ServerOptions:
    /// Sets the number of requests that are computed together.
    with_max_running(max_running: usize);
    /// Sets the number of requests that may wait.
    with_max_waiting(max_waiting: usize);
    /// Sets [`ServerOptions::prompt_part`].
    with_prompt_part(prompt_part: usize);
    /// Sets the limit of all caches together.
    with_max_cache_bytes(max_cache_bytes: Option<usize>);
}

impl ServerOptions {
    /// Rejects limits of 0.
    ///
    /// # Errors
    /// [`ServingError::Option`] naming the option.
    pub fn check(&self) -> Result<(), ServingError> {
        for (option, value) in [
            ("max_running", self.max_running),
            ("max_waiting", self.max_waiting),
            ("prompt_part", self.prompt_part),
        ] {
            if value == 0 {
                let expected = "at least 1";
                return Err(ServingError::Option {
                    option,
                    value,
                    expected,
                });
            }
        }
        Ok(())
    }
}
