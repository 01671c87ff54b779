//! Optimizers of candle's variables.

mod collect;
mod composed;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizer;
mod shared;
mod variable;

pub use optimizer::NamedOptimizer;
pub use variable::Variable;
