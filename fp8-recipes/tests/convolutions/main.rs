//! Convolutions in FP8, and the batch norms behind them.

mod absorbing;
mod batch_norm;
mod folding;
mod nets;
