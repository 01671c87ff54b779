//! Products of FP8 codes.

use crate::base::error::Result;
use crate::cast::tensor::Fp8Tensor;
use crate::device::{GemmOutput, backend};
use crate::graph::Ready;
use candle_core::{DType, Tensor};
use fp8_core::{Contraction, Granularity};

/// `factor * a b + bias` of two matrices, `[a.kept, b.kept]` in `dtype`: sums in f32, the factor applied to the sums, rounded
/// once before the bias is added.
pub(super) fn matrix(
    (a, a_contraction): (&Fp8Tensor, Contraction),
    (b, b_contraction): (&Fp8Tensor, Contraction),
    bias: Option<&Tensor>,
    factor: f32,
    dtype: DType,
) -> Result<Tensor> {
    let a = a.with_dequant_scale(factor)?;
    let (a, b) = (a.operand(a_contraction), b.operand(b_contraction));
    let out = GemmOutput {
        dtype,
        bias,
        use_fast_accum: false,
    };
    let storage = backend(a.dequant_scale.device())?.gemm(&a, &b, &out)?;
    Ready::new(storage, (a.kept(), b.kept()))?.into_tensor()
}

/// `factor * a b` for each matrix of a batch, one GEMM after the other: both are `[batch, rows, cols]`.
pub(super) fn batch(
    (a, a_contraction): (&Fp8Tensor, Contraction),
    (b, b_contraction): (&Fp8Tensor, Contraction),
    factor: f32,
    dtype: DType,
) -> Result<Tensor> {
    let (a_codes, b_codes) = (a.codes(), b.codes());
    let part = |x: &Fp8Tensor, codes: &Tensor, i: usize| {
        Fp8Tensor::from_parts(
            codes.get(i)?,
            x.format(),
            Granularity::Tensorwise,
            Contraction::Cols,
            x.dequant_scale().clone(),
        )
    };
    let products = (0..a_codes.dim(0)?).map(|i| {
        let (a, b) = (part(a, a_codes, i)?, part(b, b_codes, i)?);
        matrix(
            (&a, a_contraction),
            (&b, b_contraction),
            None,
            factor,
            dtype,
        )
    });
    Ok(Tensor::stack(&products.collect::<Result<Vec<_>>>()?, 0)?)
}
