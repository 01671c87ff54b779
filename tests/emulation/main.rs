//! Emulation recipes: which tensors of which operators are cast, and how.

mod operators;
mod table;
