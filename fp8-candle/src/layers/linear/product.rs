//! One GEMM of the layer.

use crate::base::data::storage::take_storage;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Fp8Tensor;
use crate::device::{GemmOutput, backend};
use candle_core::{DType, Storage, Tensor};
use fp8_core::Contraction;

/// One GEMM of the layer, by the backend or, emulated, by dequantizing and multiplying in f32.
pub(crate) fn multiply(
    (a, a_contraction): (&Fp8Tensor, Contraction),
    (b, b_contraction): (&Fp8Tensor, Contraction),
    out: &GemmOutput<'_>,
    emulate: bool,
) -> Result<Storage> {
    if !emulate {
        return backend(a.device())?.gemm(
            &a.operand(a_contraction),
            &b.operand(b_contraction),
            out,
        );
    }
    let a = a.dequantize(DType::F32)?;
    let b = b.dequantize(DType::F32)?;
    let a = if a_contraction == Contraction::Cols {
        a
    } else {
        a.t()?
    };
    let b = if b_contraction == Contraction::Cols {
        b.t()?
    } else {
        b
    };
    take_storage(add_bias(a.matmul(&b)?.to_dtype(out.dtype)?, out.bias)?)
}

/// A result quantized and dequantized by its cast, if it has one.
pub(crate) fn recast(x: Tensor, cast: Option<&Quantizer>) -> Result<Tensor> {
    match cast {
        None => Ok(x),
        Some(cast) => {
            let quantized = cast.quantize(&x, Contraction::Cols)?.tensor;
            quantized.dequantize(x.dtype())
        }
    }
}

pub(super) fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        None => Ok(y),
        Some(bias) => Ok(y.broadcast_add(bias)?),
    }
}
