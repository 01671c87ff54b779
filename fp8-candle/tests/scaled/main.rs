//! Scaled arithmetic.

mod compound;
mod equivariance;
mod errors;
mod golden_data;
mod goldens;
#[allow(dead_code, reason = "not every part uses all of it")]
mod gradient_check;
mod gradients_compound;
mod gradients_elementwise;
mod products;
mod tape;
