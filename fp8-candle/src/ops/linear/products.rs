//! The products of a linear layer in high precision: forward, and of its gradients.

use crate::base::error::{Result, dtype_error};
use crate::base::profile::{Kind, enter};
use crate::device::backend;
use crate::device::cpu::{self, elements::to_bf16};
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{Cols, Rows};

/// What the operands of products are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Products {
    /// Tensors as they are.
    AsTheyAre,
    /// Tensors rounded to bf16.
    InBf16,
}

impl Products {
    /// By the option `dtype`, for an `x` of dtype `of`.
    ///
    /// # Errors
    /// If it is neither bf16 nor `of`.
    pub(crate) fn new(op: &'static str, dtype: Option<DType>, of: DType) -> Result<Self> {
        match dtype {
            None => Ok(Self::AsTheyAre),
            Some(DType::BF16) => Ok(Self::InBf16),
            Some(dtype) if dtype == of => Ok(Self::AsTheyAre),
            Some(dtype) => {
                let expected = "bf16, or the dtype of x";
                Err(dtype_error(op, "the dtype of operands", expected, dtype))
            }
        }
    }

    /// `x`, outside any graph, as an operand of several products.
    pub(crate) fn operand(self, x: &Tensor) -> Result<Tensor> {
        let x = x.detach();
        match self {
            Self::AsTheyAre => Ok(x),
            Self::InBf16 if x.device().is_cpu() => to_bf16(&x),
            Self::InBf16 => Ok(x.to_dtype(DType::BF16)?.contiguous()?),
        }
    }

    /// `x weight^T + bias`, `[rows, out]` in `dtype`, of `[rows, in]`, `[out, in]` and `[out]`, all outside any graph.
    pub(crate) fn forward(
        self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        dtype: DType,
    ) -> Result<Tensor> {
        let y = match self {
            Self::InBf16 => {
                let (x, weight) = (self.operand(x)?, self.operand(weight)?);
                let _scope = enter(Kind::Gemm);
                backend(x.device())?.product_bf16((&x, Cols), (&weight, Cols), dtype)?
            }
            Self::AsTheyAre if x.device().is_cpu() => {
                crate::base::simd::check()?;
                let _scope = enter(Kind::Gemm);
                return cpu::linear::linear(&x.to_dtype(dtype)?, weight, bias);
            }
            Self::AsTheyAre => {
                let weight = weight.to_dtype(dtype)?;
                x.to_dtype(dtype)?.matmul(&weight.t()?)?
            }
        };
        Ok(match bias {
            Some(bias) => y.broadcast_add(&bias.detach().to_dtype(dtype)?)?,
            None => y,
        })
    }

    /// `grad weight`, `[rows, in]` in `dtype`, of `[rows, out]` and `[out, in]`.
    pub(crate) fn grad_input(self, grad: &Tensor, weight: &Tensor, dtype: DType) -> Result<Tensor> {
        let _scope = enter(Kind::Gemm);
        match self {
            Self::InBf16 => {
                let (grad, weight) = (self.operand(grad)?, self.operand(weight)?);
                backend(grad.device())?.product_bf16((&grad, Cols), (&weight, Rows), dtype)
            }
            Self::AsTheyAre => {
                let weight = weight.to_dtype(grad.dtype())?;
                Ok(grad.matmul(&weight)?.to_dtype(dtype)?)
            }
        }
    }

    /// `grad^T x`, `[out, in]` in `dtype`, of `[rows, out]` and `[rows, in]`.
    pub(crate) fn grad_weight(self, grad: &Tensor, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let _scope = enter(Kind::Gemm);
        match self {
            Self::InBf16 => {
                let (grad, x) = (self.operand(grad)?, self.operand(x)?);
                backend(grad.device())?.product_bf16((&grad, Rows), (&x, Rows), dtype)
            }
            Self::AsTheyAre => {
                let product = backend(grad.device())?.transposed_product(grad, x)?;
                Ok(product.to_dtype(dtype)?)
            }
        }
    }
}
