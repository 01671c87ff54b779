//! Differentiable operations: values, gradients, few tokens, no tokens, errors, profiles, and operations in wide nodes.

mod empty;
mod errors;
mod few_tokens;
mod forward;
mod gradients;
mod isa;
mod linear;
mod profile;
mod tmp_bench;
mod wide;
