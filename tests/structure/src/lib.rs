//! Reads which files of a crate import which, so that tests can hold rules about it.
//!
//! [`Crate::read`] follows the `mod` declarations from a crate's root file, without test modules. [`Crate::arrows`] resolves every
//! `use` line and every qualified path to the file that defines the name, through re-exports. [`circles`] finds files
//! that import each other.

mod arrows;
mod circles;
mod module;
mod resolve;

pub use arrows::Arrow;
pub use circles::circles;
pub use module::Crate;
