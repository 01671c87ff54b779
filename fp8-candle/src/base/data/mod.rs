//! Plain data that devices and operations exchange. Nothing here computes or knows a device.

pub(crate) mod attention;
pub(crate) mod attention_products;
pub mod codes;
pub mod columns;
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "only the kernels of a GPU read it")
)]
pub(crate) mod made;
pub mod scales;
pub(crate) mod storage;
pub(crate) mod window;

/// `[product of the leading dims, last dim]`; a scalar is 1x1.
pub fn matrix_dims(dims: &[usize]) -> (usize, usize) {
    match dims {
        [] => (1, 1),
        [leading @ .., last] => (leading.iter().product(), *last),
    }
}
