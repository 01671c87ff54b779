//! Optimizers of candle's variables.

mod composed;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizer;
mod parts;
mod sharded;
mod variable;

pub use optimizer::NamedOptimizer;
pub use variable::Variable;
