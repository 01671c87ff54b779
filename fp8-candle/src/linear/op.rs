//! The autograd node of the FP8 linear layer.

use super::plan::{GemmPlan, LinearPlan, LinearWeight};
use super::product::{multiply, recast};
use super::same::serves_both;
use crate::data::matrix_dims;
use crate::device::{GemmOutput, backend};
use crate::error::{Result, internal};
use crate::packed::PackedWeight;
use crate::ready::Ready;
use crate::tensor::Fp8Tensor;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Shape, Tensor,
};
use fp8_core::Contraction::{Cols, Rows};

/// FP8 copies from the forward pass that the backward pass can reuse.
#[derive(Debug, Default)]
pub(super) struct Saved {
    x: Option<Fp8Tensor>,
    weight: Option<Fp8Tensor>,
    frozen: Option<Frozen>,
}

/// The weight of a layer that has only FP8 codes.
#[derive(Debug)]
enum Frozen {
    Codes(Fp8Tensor),
    Packed(PackedWeight),
}

impl Saved {
    /// Keeps what the gradients will need. Each operand comes with whether it is in the graph.
    pub(super) fn keep(
        &mut self,
        plan: &LinearPlan,
        output: &GemmPlan,
        (x_tracks, x8): (bool, Fp8Tensor),
        (weight_tracks, w8): (bool, Fp8Tensor),
    ) {
        let serves = |gemm: &Option<GemmPlan>, first| {
            gemm.as_ref()
                .is_some_and(|gemm| serves_both(first, &gemm.b))
        };
        if weight_tracks && serves(&plan.grad_weight, &output.a) {
            self.x = Some(x8);
        }
        if x_tracks && serves(&plan.grad_input, &output.b) {
            self.weight = Some(w8);
        }
    }

    /// Keeps a weight that has only FP8 codes.
    pub(super) fn keep_frozen(&mut self, x_tracks: bool, weight: LinearWeight<'_>) {
        self.frozen = match weight {
            LinearWeight::Fp8(w8) if x_tracks => Some(Frozen::Codes(w8.clone())),
            LinearWeight::Packed(w8) if x_tracks => Some(Frozen::Packed(w8.clone())),
            _ => None,
        };
    }
}

/// A forward result waiting to become a node, and what its backward pass needs.
pub(super) struct LinearOp {
    ready: Ready,
    plan: LinearPlan,
    saved: Saved,
}

impl LinearOp {
    pub(super) fn new(ready: Ready, plan: LinearPlan, saved: Saved) -> Self {
        Self { ready, plan, saved }
    }

    fn backward(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        grad_output: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (m, n) = matrix_dims(grad_output.dims());
        let go = grad_output.contiguous()?.reshape((m, n))?;
        // Kept for the second GEMM if one copy serves both.
        let mut go8 = None;
        let mut for_bias = go.clone();
        if let Some(cast) = self.plan.cast_for_bias() {
            let cast = cast.quantize_for(&go, Cols, true)?.tensor;
            for_bias = cast.dequantize(go.dtype())?;
            go8 = Some(cast);
        }
        let grad_bias = match bias {
            Some(bias) if bias.track_op() => {
                Some(backend(go.device())?.sum_rows(&for_bias, bias.dtype())?)
            }
            _ => None,
        };
        let results = &self.plan.results;
        let grad_x = if x.track_op() {
            let grad = self.grad_input(x, weight, &go, &mut go8)?;
            Some(recast(grad, results.grad_input.as_ref())?.reshape(x.shape())?)
        } else {
            None
        };
        let grad_weight = match weight {
            Some(weight) if weight.track_op() => {
                let grad = self.grad_weight(x, weight, &go, go8)?;
                Some(recast(grad, results.grad_weight.as_ref())?)
            }
            _ => None,
        };
        Ok((grad_x, grad_weight, grad_bias))
    }

    /// `go weight`, `[M, K]`, in x's dtype.
    fn grad_input(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        go: &Tensor,
        go8: &mut Option<Fp8Tensor>,
    ) -> Result<Tensor> {
        let (weight, gemm) = match (weight, &self.plan.grad_input) {
            (Some(weight), Some(gemm)) => (weight, gemm),
            (Some(weight), None) => return Ok(go.matmul(&weight.detach().to_dtype(go.dtype())?)?),
            // A frozen FP8 weight has no state for gradients, so they are computed from its dequantized value.
            (None, _) => match &self.saved.frozen {
                Some(Frozen::Codes(w8)) => return Ok(go.matmul(&w8.dequantize(go.dtype())?)?),
                Some(Frozen::Packed(w8)) => return Ok(go.matmul(&w8.dequantize(go.dtype())?)?),
                None => internal!(
                    "fp8_linear `{}`: no weight to make grad_input from",
                    self.plan.path
                ),
            },
        };
        let b = match &self.saved.weight {
            Some(saved) => saved.clone(),
            None => gemm.b.quantize(weight, Rows)?.tensor,
        };
        if self.plan.grad_output_in_high_precision {
            return Ok(go.matmul(&b.dequantize(go.dtype())?)?);
        }
        let again = |second: &GemmPlan| serves_both(&gemm.a, &second.a);
        let both = self.plan.grad_weight.as_ref().is_some_and(again) && weight.track_op();
        let a = match go8.take() {
            Some(cast) => cast,
            None => gemm.a.quantize_for(go, Cols, both)?.tensor,
        };
        let grad = self.product((&a, Cols), (&b, Rows), x, gemm)?;
        if both {
            *go8 = Some(a);
        }
        Ok(grad)
    }

    /// `go^T x`, `[N, K]`, in the weight's dtype.
    fn grad_weight(
        &self,
        x: &Tensor,
        weight: &Tensor,
        go: &Tensor,
        go8: Option<Fp8Tensor>,
    ) -> Result<Tensor> {
        let k = weight.dim(1)?;
        let x = x.detach().contiguous()?.reshape((go.dim(0)?, k))?;
        let Some(gemm) = &self.plan.grad_weight else {
            // In the order of candle's own matmul backward, so that the bits equal the plain layer's.
            return Ok(x.t()?.matmul(go)?.t()?.to_dtype(weight.dtype())?);
        };
        let b = match &self.saved.x {
            Some(saved) => saved.clone(),
            None => gemm.b.quantize(&x, Rows)?.tensor,
        };
        if self.plan.grad_output_in_high_precision {
            let grad = go.t()?.matmul(&b.dequantize(go.dtype())?)?;
            return Ok(grad.to_dtype(weight.dtype())?);
        }
        let a = match go8 {
            Some(go8) => go8,
            None => gemm.a.quantize(go, Rows)?.tensor,
        };
        self.product((&a, Rows), (&b, Rows), weight, gemm)
    }

    /// The result of a backward GEMM, detached, in the dtype of `like`.
    fn product(
        &self,
        a: (&Fp8Tensor, fp8_core::Contraction),
        b: (&Fp8Tensor, fp8_core::Contraction),
        like: &Tensor,
        gemm: &GemmPlan,
    ) -> Result<Tensor> {
        let shape = (a.0.operand(a.1).kept(), b.0.operand(b.1).kept());
        let out = GemmOutput {
            dtype: like.dtype(),
            bias: None,
            use_fast_accum: gemm.use_fast_accum,
        };
        let storage = multiply(a, b, &out, self.plan.emulate)?;
        Ready::new(storage, shape)?.into_tensor()
    }
}

const NAME: &str = "fp8_linear";

/// Arguments: x (frozen FP8 weight, no bias).
impl CustomOp1 for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(self.backward(x, None, None, grad)?.0)
    }
}

/// Arguments: x, weight.
pub(super) struct Weight(pub(super) LinearOp);

/// Arguments: x, bias (frozen FP8 weight).
pub(super) struct Bias(pub(super) LinearOp);

/// Arguments: x, weight, bias.
pub(super) struct WeightAndBias(pub(super) LinearOp);

impl CustomOp2 for Weight {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.0.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.0.ready.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (x, weight, _) = self.0.backward(x, Some(weight), None, grad)?;
        Ok((x, weight))
    }
}

impl CustomOp2 for Bias {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.0.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.0.ready.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (x, _, bias) = self.0.backward(x, None, Some(bias), grad)?;
        Ok((x, bias))
    }
}

impl CustomOp3 for WeightAndBias {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.0.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.0.ready.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.0.backward(x, Some(weight), Some(bias), grad)?)
    }
}
