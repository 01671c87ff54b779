//! What the variables of an optimizer share.

use super::super::norm::SumOfSquares;
#[cfg(feature = "cuda")]
use candle_core::Tensor;
#[cfg(feature = "cuda")]
use fp8_candle::Result;
#[cfg(feature = "cuda")]
use fp8_candle::optim::{AdamWDecision, AdamWHyperparameters, MultiTensorAdamW};

/// Memory and kernels that all variables of an optimizer share.
#[derive(Default)]
pub struct Shared {
    pub(super) sum: SumOfSquares,
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
    fn pick(&self, grads: &[Option<Tensor>]) -> candle_core::Result<Vec<Option<Tensor>>> {
        let grads = self.indices.iter().map(|&i| grads[i].as_ref());
        grads
            .map(|grad| grad.map(Tensor::contiguous).transpose())
            .collect()
    }

    /// A whole step that the device decides about: what [`MultiTensorAdamW::step`] returns.
    pub(super) fn step(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        counter: &Tensor,
    ) -> Result<Tensor> {
        let grads = self.pick(grads)?;
        self.kernels.step(&grads, hyper, counter)
    }

    /// The sum of the squares of the group's gradients, on its device.
    pub(super) fn sum_of_squares(&mut self, grads: &[Option<Tensor>]) -> Result<Tensor> {
        let grads = self.pick(grads)?;
        self.kernels.sum_of_squares(&grads)
    }

    /// The update of a step that the host has decided about.
    pub(super) fn update(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        decision: &AdamWDecision,
    ) -> Result<()> {
        let grads = self.pick(grads)?;
        self.kernels.update(&grads, hyper, decision)
    }
}
