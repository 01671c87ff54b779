//! Linear layers that several ranks hold in parts.

mod axes;
mod linear;

pub use axes::LinearAxes;
pub use linear::{ParallelLinear, column_parallel_linear, row_parallel_linear};
