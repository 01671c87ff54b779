//! What the examples that train an image classifier share.

pub mod data;
pub mod epochs;
pub mod layers;
