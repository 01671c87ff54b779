//! Reads which files of a crate import which, so that tests can enforce rules about it.
//!
//! [`Crate::read`] follows the `mod` declarations from a crate's root file, without test modules. [`Crate::arrows`] resolves every
//! path in the code, in macros and attributes too, to the file that defines the name, through re-exports. [`circles`]
//! finds files that import each other.
//!
//! Calls of methods are no paths: a method that another file defines in its own `impl` block makes no arrow.

mod arrows;
mod circles;
mod module;
mod paths;
mod resolve;
#[cfg(test)]
mod tests;

pub use arrows::Arrow;
pub use circles::circles;
pub use module::Crate;
