//! The choice of codes: each feature's weights are rounded after those of the features before it have taken their errors into account.
//!
//! With the factor of the inputs' products, A = L Lᵀ, the squared error of an output is |Lᵀ e|², where e is what its weights miss. Entry i
//! of Lᵀ e is L_ii e_i and a sum over the features after i. From the last feature to the first, that sum is known, and the code is chosen
//! that makes the entry smallest. This is Babai's nearest plane, and what GPTQ computes from the inverse of A.

use super::factor::BLOCK;
use super::prepared::PreparedInputs;
use super::scales;
use crate::check::first_outside;
use crate::error::{Error, Result};
use crate::scheme::{InputScheme, LayerScheme, grid};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Cast, Contraction, Format, Granularity, ScaleGrid, decode, encode};

/// A weight for which a search has chosen codes and scales.
#[derive(Debug, Clone)]
pub struct Searched {
    /// E4M3 codes `[out_features, in_features]`, and scales.
    pub codes: Fp8Tensor,
    /// The norm of the error of the outputs, over that of the outputs.
    pub error: f64,
    /// The same with every weight rounded to nearest under the scales of amaxes.
    pub plain_error: f64,
}

/// Chooses codes and scales of `weight`, `[out_features, in_features]`, such that its products with the inputs that are multiplied are
/// closest to its own products with those that are meant. Where plain rounding is closer, its codes and scales are kept: for each row that
/// shares no scale with others, else for all. `path` is for messages.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_core::Granularity;
/// use fp8_files::search::{InputProducts, PreparedInputs, SearchOptions, search_weight};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (weight, x) = (Tensor::randn(0f32, 1., (8, 32), &Device::Cpu)?, Tensor::randn(0f32, 1., (64, 32), &Device::Cpu)?);
/// let mut products = InputProducts::new(32)?;
/// products.add(&x, &x)?;
/// let inputs = PreparedInputs::new(&products, &SearchOptions::new(), "fc")?;
/// let found = search_weight(&weight, Granularity::Rowwise, &inputs, "fc")?;
/// assert_eq!(found.codes.dims(), [8, 32]);
/// assert!(found.error <= found.plain_error);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::TensorShape`] and [`Error::TensorValue`] for a weight that does not fit or is not finite; and if an operation fails.
pub fn search_weight(
    weight: &Tensor,
    granularity: Granularity,
    inputs: &PreparedInputs,
    path: &str,
) -> Result<Searched> {
    let weight = weight.to_dtype(DType::F32)?;
    let k = inputs.features();
    let n = match *weight.dims() {
        [n, features] if features == k => n,
        _ => {
            return Err(Error::TensorShape {
                tensor: crate::names::weight_name(path),
                got: weight.dims().to_vec(),
                expected: format!("two dimensions, with {k} input features"),
            });
        }
    };
    if let Some((index, value)) = first_outside(&weight, f64::is_finite)? {
        return Err(Error::TensorValue {
            tensor: crate::names::weight_name(path),
            index,
            value,
            expected: "finite, as a weight has to be".into(),
        });
    }
    let problem = Problem::new(&weight, inputs)?;
    let input = InputScheme::None;
    let scheme = LayerScheme {
        weight: granularity,
        input,
    };
    let plain = scheme.quantize(&weight, None, false, path)?;
    let plain_errors = problem.errors(&plain)?;

    let grid = grid(granularity, n, k);
    let target = problem.in_rows()?;
    let base = scheme.quantize(&target, None, false, path)?;
    let base = base.dequant_scale().flatten_all()?.to_vec1::<f32>()?;
    let values = target.flatten_all()?.to_vec1::<f32>()?;
    let scales = scales::choose(&values, &grid, granularity, &base, &inputs.importance());
    drop(values);
    let (codes, errors) = problem.round(&grid, &scales)?;

    let plain_scales = plain.dequant_scale().flatten_all()?.to_vec1::<f32>()?;
    let plain_codes = plain.codes().flatten_all()?.to_vec1::<u8>()?;
    let (mut codes, mut scales) = (codes, scales);
    let rows_with_own_scales = match grid.block_rows() {
        1 => 1,
        _ => n.max(1),
    };
    let mut error = 0f64;
    for first in (0..n).step_by(rows_with_own_scales) {
        let rows = first..(first + rows_with_own_scales).min(n);
        let sum = |errors: &[f64]| errors[rows.clone()].iter().sum::<f64>();
        let (found, plain) = (sum(&errors), sum(&plain_errors));
        // Not if it is no number.
        let is_better = found <= plain;
        error += if is_better { found } else { plain };
        if !is_better {
            let (elements, own) = (rows.start * k..rows.end * k, grid.index(rows.start, 0)..);
            codes[elements.clone()].copy_from_slice(&plain_codes[elements]);
            let own = match rows_with_own_scales {
                1 => own.start..own.start + grid.scale_cols(),
                _ => 0..scales.len(),
            };
            scales[own.clone()].copy_from_slice(&plain_scales[own]);
        }
    }
    let codes = Tensor::from_vec(codes, (n, k), &Device::Cpu)?;
    let scales = Tensor::from_vec(scales, (grid.scale_rows(), grid.scale_cols()), &Device::Cpu)?;
    let codes = Fp8Tensor::from_parts(codes, Format::E4M3, granularity, Contraction::Cols, scales)?;
    let whole = problem.norm()?;
    let relative = |error: f64| match whole {
        0. => 0.,
        whole => (error / whole).sqrt(),
    };
    Ok(Searched {
        codes,
        error: relative(error),
        plain_error: relative(plain_errors.iter().sum()),
    })
}

/// A weight that is searched, and its inputs.
struct Problem<'a> {
    inputs: &'a PreparedInputs,
    /// The best weights without rounding, `[features, outputs]` in f32, in the order of the inputs' positions.
    target: Tensor,
}

impl<'a> Problem<'a> {
    fn new(weight: &Tensor, inputs: &'a PreparedInputs) -> Result<Self> {
        let weight = weight.t()?.to_dtype(DType::F64)?.contiguous()?;
        let mut target = weight.index_select(&inputs.index()?, 0)?;
        if let Some(correction) = inputs.correction(&weight)? {
            target = (target + correction)?;
        }
        let target = target.to_dtype(DType::F32)?;
        Ok(Self { inputs, target })
    }

    /// The weights in their own layout, `[outputs, features]`.
    fn in_rows(&self) -> Result<Tensor> {
        let rows = self.target.index_select(&self.inputs.places()?, 0)?;
        Ok(rows.t()?.contiguous()?)
    }

    /// The squared norms of the outputs, together.
    fn norm(&self) -> Result<f64> {
        let outputs = self.inputs.transposed.matmul(&self.target)?;
        let squares = outputs.to_dtype(DType::F64)?.sqr()?;
        Ok(squares.sum_all()?.to_scalar()?)
    }

    /// The squared error of each output.
    fn errors(&self, codes: &Fp8Tensor) -> Result<Vec<f64>> {
        let values = codes.dequantize(DType::F32)?.t()?.contiguous()?;
        let missing = (&self.target - values.index_select(&self.inputs.index()?, 0)?)?;
        let errors = self.inputs.transposed.matmul(&missing)?;
        let errors = errors.to_dtype(DType::F64)?;
        Ok(errors.sqr()?.sum(0)?.to_vec1::<f64>()?)
    }

    /// The codes under these dequant_scales, `[outputs, features]`, and the squared error of each output.
    fn round(&self, grid: &ScaleGrid, scales: &[f32]) -> Result<(Vec<u8>, Vec<f64>)> {
        let (k, n) = self.target.dims2()?;
        let cast = Cast::new(Format::E4M3);
        let (mut codes, mut errors) = (vec![0u8; n * k], vec![0f64; n]);
        let (mut units, mut column, mut rounded) = (vec![0f32; n], vec![0u8; n], vec![0f32; n]);
        // What the weights of the features that are done miss, a block of features each, the last ones first.
        let mut missing: Vec<Tensor> = vec![];
        for start in (0..k).step_by(BLOCK).rev() {
            let len = BLOCK.min(k - start);
            let rows = self.inputs.transposed.narrow(0, start, len)?;
            let after = start + len;
            let mut sums = match missing.is_empty() {
                true => vec![0f32; len * n],
                false => {
                    let done: Vec<&Tensor> = missing.iter().rev().collect();
                    let sums = rows
                        .narrow(1, after, k - after)?
                        .matmul(&Tensor::cat(&done, 0)?)?;
                    sums.flatten_all()?.to_vec1::<f32>()?
                }
            };
            let square = rows
                .narrow(1, start, len)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            let target = self
                .target
                .narrow(0, start, len)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            let mut own = vec![0f32; len * n];
            for i in (0..len).rev() {
                let feature = self.inputs.order[start + i] as usize;
                let diagonal = square[i * len + i];
                let (target, sums) = (&target[i * n..][..n], &mut sums[i * n..][..n]);
                for j in i + 1..len {
                    let factor = square[i * len + j];
                    for (sum, missing) in sums.iter_mut().zip(&own[j * n..][..n]) {
                        *sum += factor * missing;
                    }
                }
                for (row, unit) in units.iter_mut().enumerate() {
                    let wanted = target[row] + sums[row] / diagonal;
                    // A quotient, as in plain rounding with a scale per tensor; a product with the reciprocal has another code at some ties.
                    *unit = wanted / scales[grid.index(row, feature)];
                }
                encode(&cast, &units, 1., &mut column);
                decode(Format::E4M3, &column, 1., &mut rounded);
                let own = &mut own[i * n..][..n];
                for row in 0..n {
                    let value = rounded[row] * scales[grid.index(row, feature)];
                    own[row] = target[row] - value;
                    let error = f64::from(diagonal * own[row] + sums[row]);
                    errors[row] += error * error;
                    codes[row * k + feature] = column[row];
                }
            }
            missing.push(Tensor::from_vec(own, (len, n), &Device::Cpu)?);
        }
        Ok((codes, errors))
    }
}
