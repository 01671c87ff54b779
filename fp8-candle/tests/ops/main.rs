//! Differentiable operations: values, gradients, few tokens, no tokens, errors, profiles, and operations in wide nodes, also with values kept in FP8.

mod embedding;
mod empty;
mod errors;
mod few_tokens;
mod forward;
mod gradients;
mod isa;
mod kept;
mod linear;
mod max_pool;
mod nested;
mod profile;
mod wide;
