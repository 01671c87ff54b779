//! Dense layers with any axes, new layers in parts, and training runs as one value.

mod einsum;
mod errors;
mod forms;
mod goldens;
mod lifecycle;
mod linear;
mod parallel;
mod reference;
mod train_state;
