//! The autograd node of a convolution with tensorwise casts.

use super::operand::Values;
use super::products::{Geometry, gather, spread, weigh};
use crate::device::backend;
use crate::error::Result;
use crate::linear::{GemmPlan, LinearPlan, recast, serves_both};
use crate::ready::{Ready, tensor_of};
use crate::tensor::Fp8Tensor;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Storage, Tensor,
};
use fp8_core::Contraction::Cols;

/// What one call computes: a convolution, or a transposed one, which swaps input and output.
#[derive(Debug, Clone)]
pub(super) struct Convolution {
    pub(super) geometry: Geometry,
    pub(super) transposed: bool,
}

impl Convolution {
    /// `[batch, channels, height, width]` of the input.
    pub(super) fn input_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.window.dims(),
            true => self.geometry.maps().dims(),
        }
    }

    /// `[batch, channels, height, width]` of the output.
    pub(super) fn output_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.maps().dims(),
            true => self.geometry.window.dims(),
        }
    }

    /// The output, in `dtype`.
    pub(super) fn output(
        &self,
        x: &Values,
        weight: &Values,
        bias: Option<&Tensor>,
        dtype: DType,
        use_fast_accum: bool,
    ) -> Result<Storage> {
        let product = if self.transposed { spread } else { gather };
        product(
            &self.geometry,
            &x.reshape(&self.input_dims())?,
            &weight.reshape(&self.geometry.weight_dims())?,
            bias,
            dtype,
            use_fast_accum,
        )
    }

    fn grad_input(
        &self,
        go: &Values,
        weight: &Values,
        dtype: DType,
        use_fast_accum: bool,
    ) -> Result<Storage> {
        let product = if self.transposed { gather } else { spread };
        product(
            &self.geometry,
            &go.reshape(&self.output_dims())?,
            &weight.reshape(&self.geometry.weight_dims())?,
            None,
            dtype,
            use_fast_accum,
        )
    }

    /// In f32.
    fn grad_weight(&self, go: &Values, x: &Values, use_fast_accum: bool) -> Result<Tensor> {
        let go = go.reshape(&self.output_dims())?;
        let x = x.reshape(&self.input_dims())?;
        match self.transposed {
            false => weigh(&self.geometry, &go, &x, use_fast_accum),
            true => weigh(&self.geometry, &x, &go, use_fast_accum),
        }
    }
}

/// FP8 copies from the forward pass that the backward pass can reuse.
#[derive(Debug, Default)]
pub(super) struct Saved {
    x: Option<Fp8Tensor>,
    weight: Option<Fp8Tensor>,
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
}

/// A forward result waiting to become a node, and what its backward pass needs.
pub(super) struct ConvOp {
    pub(super) name: &'static str,
    pub(super) ready: Ready,
    pub(super) convolution: Convolution,
    pub(super) plan: LinearPlan,
    pub(super) saved: Saved,
}

impl ConvOp {
    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        grad_output: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let go = grad_output.detach().contiguous()?;
        // Kept for the second product if one copy serves both.
        let mut go8 = None;
        let mut for_bias = go.clone();
        if let Some(cast) = self.plan.cast_for_bias() {
            let cast = cast.quantize(&go, Cols)?.tensor;
            for_bias = cast.dequantize(go.dtype())?;
            go8 = Some(cast);
        }
        let grad_bias = match bias {
            Some(bias) if bias.track_op() => Some(self.grad_bias(&for_bias, bias.dtype())?),
            _ => None,
        };
        let results = &self.plan.results;
        let grad_x = match x.track_op() {
            true => {
                let grad = self.grad_input(x, weight, &go, &mut go8)?;
                Some(recast(grad, results.grad_input.as_ref())?)
            }
            false => None,
        };
        let grad_weight = match weight.track_op() {
            true => {
                let grad = self.grad_weight(x, weight, &go, go8)?;
                Some(recast(grad, results.grad_weight.as_ref())?)
            }
            false => None,
        };
        Ok((grad_x, grad_weight, grad_bias))
    }

    /// The weight as operand B of `gemm`.
    fn weight_codes(&self, gemm: &GemmPlan, weight: &Tensor) -> Result<Fp8Tensor> {
        match &self.saved.weight {
            Some(saved) => Ok(saved.clone()),
            None => Ok(gemm.b.quantize(weight, Cols)?.tensor),
        }
    }

    /// The input as operand B of `gemm`.
    fn input_codes(&self, gemm: &GemmPlan, x: &Tensor) -> Result<Fp8Tensor> {
        match &self.saved.x {
            Some(saved) => Ok(saved.clone()),
            None => Ok(gemm.b.quantize(x, Cols)?.tensor),
        }
    }

    /// In x's dtype and shape.
    fn grad_input(
        &self,
        x: &Tensor,
        weight: &Tensor,
        go: &Tensor,
        go8: &mut Option<Fp8Tensor>,
    ) -> Result<Tensor> {
        let (go, weight, fast) = match &self.plan.grad_input {
            None => (
                Values::high_precision(go)?,
                // As the forward pass of a layer in high precision casts it.
                Values::high_precision(&weight.detach().to_dtype(x.dtype())?)?,
                false,
            ),
            Some(gemm) if self.plan.grad_output_in_high_precision => {
                let b = self.weight_codes(gemm, weight)?;
                (Values::high_precision(go)?, Values::new(&b, true)?, false)
            }
            Some(gemm) => {
                let a = match go8.take() {
                    Some(go8) => go8,
                    None => gemm.a.quantize(go, Cols)?.tensor,
                };
                let b = self.weight_codes(gemm, weight)?;
                let emulate = self.plan.emulate;
                let values = (Values::new(&a, emulate)?, Values::new(&b, emulate)?);
                let again = |second: &GemmPlan| serves_both(&gemm.a, &second.a);
                if weight.track_op() && self.plan.grad_weight.as_ref().is_some_and(again) {
                    *go8 = Some(a);
                }
                (values.0, values.1, gemm.use_fast_accum)
            }
        };
        let grad = self.convolution.grad_input(&go, &weight, x.dtype(), fast)?;
        tensor_of(grad, x.shape())
    }

    /// In the weight's dtype and shape.
    fn grad_weight(
        &self,
        x: &Tensor,
        weight: &Tensor,
        go: &Tensor,
        go8: Option<Fp8Tensor>,
    ) -> Result<Tensor> {
        let (go, x, fast) = match &self.plan.grad_weight {
            None => (
                Values::high_precision(go)?,
                Values::high_precision(x)?,
                false,
            ),
            Some(gemm) if self.plan.grad_output_in_high_precision => {
                let b = self.input_codes(gemm, x)?;
                (Values::high_precision(go)?, Values::new(&b, true)?, false)
            }
            Some(gemm) => {
                let a = match go8 {
                    Some(go8) => go8,
                    None => gemm.a.quantize(go, Cols)?.tensor,
                };
                let b = self.input_codes(gemm, x)?;
                let emulate = self.plan.emulate;
                let values = (Values::new(&a, emulate)?, Values::new(&b, emulate)?);
                (values.0, values.1, gemm.use_fast_accum)
            }
        };
        let grad = self.convolution.grad_weight(&go, &x, fast)?;
        Ok(grad.to_dtype(weight.dtype())?.reshape(weight.shape())?)
    }

    /// The sum of each channel, added in f32.
    fn grad_bias(&self, go: &Tensor, dtype: DType) -> Result<Tensor> {
        let [batch, channels, height, width] = self.convolution.output_dims();
        let rows = go
            .to_dtype(DType::F32)?
            .reshape((batch * channels, height * width))?
            .sum(1)?
            .reshape((batch, channels))?;
        backend(go.device())?.sum_rows(&rows, dtype)
    }
}

/// Arguments: x, weight.
pub(super) struct Weight(pub(super) ConvOp);

/// Arguments: x, weight, bias.
pub(super) struct WeightAndBias(pub(super) ConvOp);

impl CustomOp2 for Weight {
    fn name(&self) -> &'static str {
        self.0.name
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
        let (x, weight, _) = self.0.backward(x, weight, None, grad)?;
        Ok((x, weight))
    }
}

impl CustomOp3 for WeightAndBias {
    fn name(&self) -> &'static str {
        self.0.name
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
        Ok(self.0.backward(x, weight, Some(bias), grad)?)
    }
}
