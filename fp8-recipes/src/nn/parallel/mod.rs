//! Layers that several ranks hold in parts.

mod axes;
mod dense;
mod linear;
mod shards;

pub use axes::LinearAxes;
pub use dense::ParallelDense;
pub use linear::{ParallelLinear, column_parallel_linear, row_parallel_linear};
