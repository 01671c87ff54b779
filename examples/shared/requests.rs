//! Requests of the system to stop: Ctrl-C, and on Unix SIGTERM, which service managers and job queues send.

use anyhow::Result;

/// What the system has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    #[cfg(unix)]
    Terminate,
}

impl Request {
    /// The exit code of a program that it has ended, as shells have it: 128 and the number of the signal.
    pub fn code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            #[cfg(unix)]
            Self::Terminate => 143,
        }
    }
}

/// From now on calls `act` for each request, on a thread of its own. Call it once.
#[cfg(unix)]
pub fn on_request(mut act: impl FnMut(Request) + Send + 'static) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    let thread = std::thread::Builder::new().name("requests".into());
    thread.spawn(move || {
        for signal in signals.forever() {
            act(match signal {
                SIGTERM => Request::Terminate,
                _ => Request::Interrupt,
            });
        }
    })?;
    Ok(())
}

/// From now on calls `act` for each request, on a thread of its own. Call it once.
#[cfg(not(unix))]
pub fn on_request(mut act: impl FnMut(Request) + Send + 'static) -> Result<()> {
    Ok(ctrlc::set_handler(move || act(Request::Interrupt))?)
}
