//! What fused operations have in common as nodes of the graph.

use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::graph::{Ready, attach};
use candle_core::Tensor;

/// [`attach`] for an operation whose time counts as `kind`, and whose backward function takes a contiguous gradient.
pub(super) fn node<const N: usize>(
    name: &'static str,
    kind: Kind,
    args: [&Tensor; N],
    result: Ready,
    backward: impl Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]>
    + Send
    + Sync
    + 'static,
) -> Result<Tensor> {
    attach(name, args, result, move |args, result, grad| {
        let _scope = enter(kind);
        backward(args, result, &grad.contiguous()?)
    })
}
