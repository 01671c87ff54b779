//! Serving many requests at once.

mod ends;
mod gated;
mod joining;
mod limits;
mod same;
mod text;
mod workers;
