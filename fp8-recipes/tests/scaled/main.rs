//! Parameters and optimizers of scaled arithmetic.

mod adamw;
mod helpers;
mod invariance;
mod lora;
mod norms;
mod resume;
mod sgd;
mod var_map;
