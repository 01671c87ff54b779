//! Files that others made: what is loaded from them, and what is refused.

mod config;
mod hostile;
mod refused;
