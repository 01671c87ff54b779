//! Files from other tools: how they load, and which are refused.

mod config;
mod hostile;
mod hostile_state;
mod refused;
