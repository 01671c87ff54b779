//! Emulation recipes: which tensors of which operators are cast, and how.

mod convolutions;
mod emulator;
mod operators;
mod resume;
mod table;
