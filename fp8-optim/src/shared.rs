//! What the parameters of an optimizer share.

use super::divided::Divided;
use super::exchange::Exchange;
use super::norm::SumOfSquares;
use super::rounding::{RoundTo, ScaledCounts};
#[cfg(feature = "cuda")]
use candle_core::Tensor;
#[cfg(feature = "cuda")]
use fp8_candle::optim::MultiTensorAdamW;

/// Memory, kernels and settings that all parameters of an optimizer share.
#[derive(Default)]
pub struct Shared {
    pub(super) sum: SumOfSquares,
    /// The other ranks, if each has a part of the parameters.
    pub(super) exchange: Option<Exchange>,
    /// The other ranks, if they hold some parameters in parts and the others whole.
    pub(super) divided: Option<Divided>,
    /// The rounding of scaled parameters, None for variables.
    pub(super) round: Option<RoundTo>,
    /// What happened to scaled parameters.
    pub(super) counts: ScaledCounts,
    /// One per CUDA device; made when a step needs them.
    #[cfg(feature = "cuda")]
    pub(super) groups: Option<Vec<KernelGroup>>,
}

impl Shared {
    /// Drops kernels that hold moments and decay flags which have changed.
    pub(super) fn forget_kernels(&mut self) {
        #[cfg(feature = "cuda")]
        {
            self.groups = None;
        }
    }
}

/// The variables of one CUDA device that kernels update together.
#[cfg(feature = "cuda")]
pub(super) struct KernelGroup {
    /// Indices of the variables, rising.
    pub(super) indices: Vec<usize>,
    pub(super) kernels: MultiTensorAdamW,
}

#[cfg(feature = "cuda")]
impl KernelGroup {
    /// The group's gradients out of those of all variables, contiguous.
    pub(super) fn pick(
        &self,
        grads: &[Option<Tensor>],
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let grads = self.indices.iter().map(|&i| grads[i].as_ref());
        grads
            .map(|grad| grad.map(Tensor::contiguous).transpose())
            .collect()
    }
}
