//! The choice of codes: each feature's weights are rounded after those of the features before it have taken their errors into account.
//!
//! With the factor of the inputs' products, A = L Lᵀ, the squared error of an output is |Lᵀ e|², where e is what its weights miss. Entry i
//! of Lᵀ e is L_ii e_i and a sum over the features after i. From the last feature to the first, that sum is known, and the code is chosen
//! that makes the entry smallest. This is Babai's nearest plane, and what GPTQ computes from the inverse of A.

use super::SearchOptions;
use super::factor::{BLOCK, Factor};
use super::products::InputProducts;
use super::scales;
use crate::check::first_outside;
use crate::error::{Error, Result};
use crate::scheme::{InputScheme, LayerScheme, grid};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Cast, Contraction, Format, Granularity, ScaleGrid, decode, encode};

/// How often the damping is multiplied by ten, if the products with it have no factor.
const RETRIES: usize = 3;

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
/// use fp8_files::search::{InputProducts, SearchOptions, search_weight};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (weight, x) = (Tensor::randn(0f32, 1., (8, 32), &Device::Cpu)?, Tensor::randn(0f32, 1., (64, 32), &Device::Cpu)?);
/// let mut products = InputProducts::new(32)?;
/// products.add(&x, &x)?;
/// let options = SearchOptions::new();
/// let found = search_weight(&weight, Granularity::Rowwise, &products, &options, "fc")?;
/// assert_eq!(found.codes.dims(), [8, 32]);
/// assert!(found.error <= found.plain_error);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Search`] if there was no token, or the products are not finite; [`Error::TensorShape`] and [`Error::TensorValue`] for a weight
/// that does not fit or is not finite; and if an operation fails.
pub fn search_weight(
    weight: &Tensor,
    granularity: Granularity,
    products: &InputProducts,
    options: &SearchOptions,
    path: &str,
) -> Result<Searched> {
    let weight = weight.to_dtype(DType::F32)?;
    let k = products.features();
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
    let problem = Problem::new(&weight, products, options, path)?;
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
    let scales = scales::choose(&values, &grid, granularity, &base, &problem.importance());
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

/// The best weights without rounding, and the factor that says what errors of weights do to outputs. Features are in ascending order of
/// their squares, so that the largest is rounded first.
struct Problem {
    /// Position to feature.
    order: Vec<u32>,
    /// Lᵀ in f32.
    transposed: Tensor,
    diagonal: Vec<f64>,
    /// The best weights, `[features, outputs]` in f32.
    target: Tensor,
}

impl Problem {
    fn new(
        weight: &Tensor,
        products: &InputProducts,
        options: &SearchOptions,
        path: &str,
    ) -> Result<Self> {
        let failed = |reason: String| Error::Search {
            path: path.to_string(),
            reason,
        };
        if products.tokens() == 0 {
            return Err(failed("no token of the samples has reached it".into()));
        }
        let squares = products.squares()?;
        if let Some(i) = squares.iter().position(|square| !square.is_finite()) {
            return Err(failed(format!(
                "the sum of squares of its input {i} is {}, expected a finite number",
                squares[i]
            )));
        }
        let mut order: Vec<u32> = (0..squares.len() as u32).collect();
        order.sort_by(|a, b| squares[*a as usize].total_cmp(&squares[*b as usize]));
        let index = Tensor::from_slice(&order, order.len(), &Device::Cpu)?;
        let in_order = |x: Tensor| x.index_select(&index, 0)?.index_select(&index, 1);
        let missing = products.missing()?;
        let mut damping = options.damping;
        for _ in 0..=RETRIES {
            let own = in_order(products.damped(damping)?)?;
            let cautious = in_order(products.damped(damping.max(options.caution))?)?;
            if let (Some(factor), Some(cautious)) = (Factor::new(&own)?, Factor::new(&cautious)?) {
                let weight = weight.t()?.to_dtype(DType::F64)?;
                let missing = missing.matmul(&weight)?.index_select(&index, 0)?;
                let target = (weight.index_select(&index, 0)? + cautious.solve(&missing)?)?;
                return Ok(Self {
                    order,
                    transposed: factor.transposed()?,
                    diagonal: factor.diagonal()?,
                    target: target.to_dtype(DType::F32)?,
                });
            }
            damping = damping.max(1e-4) * 10.;
        }
        Err(failed(format!(
            "the products of its inputs are not positive definite, even with {damping} of their squares added"
        )))
    }

    /// The weights in their own layout, `[outputs, features]`.
    fn in_rows(&self) -> Result<Tensor> {
        let mut places = vec![0u32; self.order.len()];
        for (position, feature) in self.order.iter().enumerate() {
            places[*feature as usize] = position as u32;
        }
        let places = Tensor::from_vec(places, self.order.len(), &Device::Cpu)?;
        Ok(self.target.index_select(&places, 0)?.t()?.contiguous()?)
    }

    /// How much a squared error in each feature's weights counts once later features have made up for what they can.
    fn importance(&self) -> Vec<f32> {
        let mut importance = vec![0f32; self.order.len()];
        for (feature, diagonal) in self.order.iter().zip(&self.diagonal) {
            importance[*feature as usize] = (diagonal * diagonal) as f32;
        }
        importance
    }

    /// The squared norms of the outputs, together.
    fn norm(&self) -> Result<f64> {
        Ok(self
            .transposed
            .matmul(&self.target)?
            .to_dtype(DType::F64)?
            .sqr()?
            .sum_all()?
            .to_scalar()?)
    }

    /// The squared error of each output.
    fn errors(&self, codes: &Fp8Tensor) -> Result<Vec<f64>> {
        let index = Tensor::from_slice(&self.order, self.order.len(), &Device::Cpu)?;
        let values = codes.dequantize(DType::F32)?.t()?.contiguous()?;
        let missing = (&self.target - values.index_select(&index, 0)?)?;
        let errors = self.transposed.matmul(&missing)?.to_dtype(DType::F64)?;
        Ok(errors.sqr()?.sum(0)?.to_vec1::<f64>()?)
    }

    /// The codes under these dequant_scales, `[outputs, features]`, and the squared error of each output.
    fn round(&self, grid: &ScaleGrid, scales: &[f32]) -> Result<(Vec<u8>, Vec<f64>)> {
        let (k, n) = self.target.dims2()?;
        let cast = Cast::new(Format::E4M3);
        let inverses: Vec<f32> = scales.iter().map(|scale| 1. / scale).collect();
        let (mut codes, mut errors) = (vec![0u8; n * k], vec![0f64; n]);
        let (mut units, mut column, mut rounded) = (vec![0f32; n], vec![0u8; n], vec![0f32; n]);
        // What the weights of the features that are done miss, a block of features each, the last ones first.
        let mut missing: Vec<Tensor> = vec![];
        for start in (0..k).step_by(BLOCK).rev() {
            let len = BLOCK.min(k - start);
            let rows = self.transposed.narrow(0, start, len)?;
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
                let feature = self.order[start + i] as usize;
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
                    *unit = wanted * inverses[grid.index(row, feature)];
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
