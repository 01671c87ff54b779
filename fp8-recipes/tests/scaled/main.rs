//! Parameters and optimizers of scaled arithmetic.

mod adamw;
mod helpers;
mod invariance;
mod lora;
mod resume;
mod sgd;
mod var_map;
