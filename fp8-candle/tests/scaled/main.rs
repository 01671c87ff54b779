//! Scaled arithmetic.

#[allow(dead_code, reason = "not every part uses all of it")]
mod gradient_check;
mod products;
