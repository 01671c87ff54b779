//! The forward pass of a dense layer: its input as matrices, one product or one for each entry of a batch, and back.

use super::axes::{Axes, sizes};
use super::{DenseGeneral, Weight};
use crate::FilesError;
use crate::array::{Array, Layer};
use crate::autocast::current;
use crate::error::{DenseError, Error, Result};
use crate::nn::call::{Call, calibrate, noting_failure};
use candle_core::{DType, Module, Tensor};
use fp8_candle::linear::fp8_linear_batched;
use fp8_candle::{LinearWeight, fp8_linear};
use fp8_files::names::join;

impl DenseGeneral {
    /// [`Module::forward`] with an error that can be matched: candle's `Result` carries only the message of ours.
    ///
    /// # Errors
    /// [`DenseError::Axes`] or [`DenseError::Sizes`] if the input does not have the layer's axes, [`FilesError::TensorDType`] if it is not of
    /// a floating point dtype, and errors of the guard's recipe.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("dense_general", path = self.path()).entered();
        let context = current();
        let y = self.axes(x).and_then(|axes| {
            let call = Call::decide(self, &self.state, context.as_ref())?;
            self.compute(call, x, &axes)
        });
        noting_failure(context.as_ref(), y)
    }

    /// The axes of an input, which fit the kernel.
    fn axes(&self, x: &Tensor) -> Result<Axes> {
        let (shape, path) = (x.dims(), self.shown_path());
        let axes = Axes::of(path, shape, &self.config.axis, &self.config.batch_axis)?;
        let kinds = [
            ("batch", &axes.batch, &self.batch),
            ("contracted", &axes.contracted, &self.contracted),
        ];
        for (what, axes, expected) in kinds {
            let got = sizes(shape, axes);
            if got != *expected {
                return Err(DenseError::Sizes {
                    path: path.to_string(),
                    what,
                    axes: axes.clone(),
                    shape: shape.to_vec(),
                    got,
                    expected: expected.clone(),
                }
                .into());
            }
        }
        if !x.dtype().is_float() || x.dtype() == DType::F8E4M3 {
            return Err(FilesError::TensorDType {
                tensor: join(path, "input"),
                got: x.dtype().as_str().into(),
                expected: "f32, bf16, f16 or f64".into(),
            }
            .into());
        }
        Ok(axes)
    }

    fn compute(&self, call: Call<'_>, x: &Tensor, axes: &Axes) -> Result<Tensor> {
        let rest = sizes(x.dims(), &axes.rest);
        let order = axes.order();
        let in_order = order.iter().copied().eq(0..x.rank());
        let x = match in_order {
            true => x.clone(),
            false => x.permute(order)?,
        };
        let (m, (_, k)) = (rest.iter().product::<usize>(), self.sizes());
        let y = match self.batch.is_empty() {
            true => self.product(call, &x.contiguous()?.reshape((m, k))?)?,
            false => {
                let entries: usize = self.batch.iter().product();
                self.batched(call, &x.contiguous()?.reshape((entries, m, k))?)?
            }
        };
        let y = y.reshape([&*self.batch, &*rest, &*self.config.features].concat())?;
        match self.config.activation {
            Some(activation) => Ok(activation.forward(&y)?),
            None => Ok(y),
        }
    }

    /// `[M, K]` to `[M, N]`.
    fn product(&self, call: Call<'_>, x: &Tensor) -> Result<Tensor> {
        let (n, k) = self.sizes();
        let bias = self.bias.as_ref().map(Tensor::flatten_all).transpose()?;
        let kernel = match (&call, &self.weight) {
            (Call::Static(weight), _) => return Ok(weight.forward(x, bias.as_ref())?),
            (_, Weight::Fp8(weight)) => weight.weight().dequantize(x.dtype())?.t()?,
            (Call::Fp8(state, plan), Weight::Kernel(kernel)) => {
                let weight = LinearWeight::Kernel {
                    kernel,
                    in_features: k,
                    cache: Some(&state.cache),
                };
                return Ok(fp8_linear(x, weight, bias.as_ref(), plan)?);
            }
            (_, Weight::Kernel(kernel)) => kernel.reshape((k, n))?,
        };
        if let (Call::Calibrate(state, step), Some(matrix)) = (&call, self.matrix()?) {
            calibrate(state, step, x, || Ok(matrix))?;
        }
        with_bias(x.matmul(&kernel.to_dtype(x.dtype())?)?, bias)
    }

    /// `[B, M, K]` to `[B, M, N]`.
    fn batched(&self, call: Call<'_>, x: &Tensor) -> Result<Tensor> {
        let ((n, k), (entries, m, _)) = (self.sizes(), x.dims3()?);
        let Weight::Kernel(kernel) = &self.weight else {
            let message = format!("`{}`: codes with batch axes", self.shown_path());
            return Err(candle_core::Error::Msg(message).into());
        };
        let y = match &call {
            Call::Fp8(state, plan) => fp8_linear_batched(x, kernel, Some(&state.cache), plan)?,
            call => {
                if let Call::Calibrate(state, step) = call {
                    calibrate(state, step, x, || {
                        Ok(kernel.detach().contiguous()?.reshape((entries * k, n))?)
                    })?;
                }
                let kernel = kernel.reshape((entries, k, n))?.to_dtype(x.dtype())?;
                match m {
                    0 => Tensor::zeros((entries, 0, n), x.dtype(), x.device())?,
                    _ => x.matmul(&kernel)?,
                }
            }
        };
        let bias = self.bias.as_ref();
        let bias = bias.map(|bias| bias.reshape((entries, 1, n))).transpose()?;
        with_bias(y, bias)
    }

    fn matrix(&self) -> Result<Option<Tensor>> {
        Ok(crate::Fp8Layer::weight_matrix(self)?)
    }
}

fn with_bias(y: Tensor, bias: Option<Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => Ok(y.broadcast_add(&bias.to_dtype(y.dtype())?)?),
        None => Ok(y),
    }
}

impl Module for DenseGeneral {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl<A: Array> Layer<A> for DenseGeneral {
    /// Plain tensors only.
    fn apply(&self, x: &A) -> Result<A> {
        x.by_kind(
            |x| self.try_forward(x),
            |_| {
                Err(Error::NoScaledForm {
                    layer: "a general dense layer",
                    path: self.shown_path().to_string(),
                })
            },
            |x| x.unsupported("a general dense layer"),
        )
    }
}
