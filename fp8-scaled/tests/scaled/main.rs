//! Scaled arithmetic.

mod changed;
mod channels;
mod compound;
mod equivariance;
mod errors;
mod every_operation;
mod extremes;
mod files;
mod golden_data;
mod golden_ops;
mod goldens;
#[allow(dead_code, reason = "not every part uses all of it")]
mod gradient_check;
mod gradients_compound;
mod gradients_elementwise;
mod operations;
mod product_shapes;
mod products;
mod tape;
