//! Dense layers with any axes, and training runs as one value.

mod einsum;
mod errors;
mod forms;
mod goldens;
mod lifecycle;
mod linear;
mod reference;
mod train_state;
