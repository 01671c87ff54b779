//! Linear layers as one node.

use super::arith::{Like, common_dtype, weighted_sum};
use super::check::check_same_device;
use super::error::{Result, shape};
use super::kernels::convert;
use super::matmul::{both_codes, cotangent, matrix, operand};
use super::options::Options;
use super::value::Scaled;
use candle_core::DType;
use fp8_candle::device::backend;
use fp8_candle::ops::detached::fp8_product;
use fp8_candle::ops::elements::matrix_dims;
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::scaled::{add_rule, matmul_rule, sum_rule};

impl Scaled {
    /// `x weight^T + bias` of `x` `[.., in]`, `weight` `[out, in]` and `bias` `[out]`. Scale: that of the product, `x * weight *
    /// r(sqrt(in))`, with the bias by the rule of [`Scaled::add`]. The bits are those of [`Scaled::matmul`] and [`Scaled::add`]
    /// unless a product or a bias is subnormal at its scale.
    ///
    /// The conditions for FP8 are those of [`Scaled::matmul`]. x and weight are cast once until they change, the cotangent once for
    /// both products; the gradient of the bias sums the cotangent before that cast.
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    pub fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        let op = "linear";
        let outputs = self.check_linear(op, weight, bias)?;
        let dtype = common_dtype(self, weight);
        let (x, w) = (operand(self)?, operand(weight)?);
        let value = match bias {
            None => matrix((&x, Cols), (&w, Cols), dtype)?,
            Some(bias) => affine(op, &x, &w, bias, dtype)?,
        };
        let lead = &self.dims()[..self.rank() - 1];
        let value = value.reshape(&[lead, &[outputs]].concat())?;
        let (x_like, w_like) = (Like::of(self), Like::of(weight));
        let bias_like = bias.map(Like::of);
        let (x, w) = (
            weight.is_tracked().then_some(x),
            self.is_tracked().then_some(w),
        );
        let parents: Vec<&Self> = [Some(self), Some(weight), bias]
            .into_iter()
            .flatten()
            .collect();
        Ok(Self::record_many(value, op, &parents, move |g, wanted| {
            let grad_bias = match (&bias_like, wanted.get(2)) {
                (Some(like), Some(true)) => Some(sum_of_rows(op, g, like)?),
                _ => None,
            };
            let g = cotangent(g)?;
            let grad_x = w.as_ref().map(|w| {
                let grad = matrix((&g, Cols), (w, Rows), x_like.dtype())?;
                x_like.cotangent(&grad.reshape(x_like.dims())?)
            });
            let grad_w = x.as_ref().map(|x| {
                let grad = matrix((&g, Rows), (x, Rows), w_like.dtype())?;
                w_like.cotangent(&grad)
            });
            let mut grads = vec![grad_x.transpose()?, grad_w.transpose()?];
            if bias_like.is_some() {
                grads.push(grad_bias);
            }
            Ok(grads)
        }))
    }

    fn check_linear(&self, op: &'static str, weight: &Self, bias: Option<&Self>) -> Result<usize> {
        let shape = |what, expected: String, got: &Self| shape(op, what, expected, got.dims());
        check_same_device(op, self, weight)?;
        let Some(inputs) = self.dims().last() else {
            return Err(shape("the input", "at least one dimension".into(), self));
        };
        let &[outputs, width] = weight.dims() else {
            return Err(shape("the weight", format!("[out, {inputs}]"), weight));
        };
        if width != *inputs {
            return Err(shape("the weight", format!("[out, {inputs}]"), weight));
        }
        if let Some(bias) = bias {
            check_same_device(op, self, bias)?;
            if bias.dims() != [outputs] {
                return Err(shape("the bias", format!("[{outputs}]"), bias));
            }
        }
        Ok(outputs)
    }
}

/// `x weight^T + bias`, in FP8 with all factors and the bias in the epilogue.
fn affine(op: &'static str, x: &Scaled, w: &Scaled, bias: &Scaled, dtype: DType) -> Result<Scaled> {
    let options = Options::current();
    let Some((x8, w8)) = both_codes(x, w) else {
        let product = matrix((x, Cols), (w, Cols), dtype)?;
        let bias = bias.detach();
        // As in an addition: in the dtype of the product.
        let rule = add_rule(product.scale(), bias.scale(), options.round());
        let product_data = product.float(dtype)?;
        let bias = convert(op, &bias.data()?, 1.0, dtype)?;
        let bias = bias.broadcast_as(product_data.dims())?.contiguous()?;
        return Ok(Scaled::new(
            weighted_sum(op, &product_data, &bias, &rule, 1.0)?,
            rule.scale,
        ));
    };
    let (_, inputs) = matrix_dims(x.dims());
    let product = matmul_rule(x.scale(), w.scale(), inputs, options.round());
    let rule = add_rule(product.scale, bias.scale(), options.round());
    let [product_factor, bias_factor] = rule.data_factors;
    options.count_matmul(true);
    let bias_data = convert(op, &bias.data()?, bias_factor, dtype)?;
    if product_factor == 0.0 {
        // Do not multiply codes of a tensor of zero scale: they have no meaning.
        let (rows, _) = matrix_dims(x.dims());
        let dims = (rows, bias_data.elem_count());
        let data = bias_data.broadcast_as(dims)?.contiguous()?;
        return Ok(Scaled::new(data, rule.scale));
    }
    let data = fp8_product(
        (x8, Cols),
        (w8, Cols),
        Some(&bias_data),
        product.data_factor * product_factor,
        dtype,
    )?;
    Scaled::new(data, rule.scale).zeroed()
}

/// The sums over all dimensions but the last, by the rule of sums: in f32, rounded once.
fn sum_of_rows(op: &'static str, g: &Scaled, like: &Like) -> Result<Scaled> {
    let (rows, cols) = matrix_dims(g.dims());
    let rule = sum_rule(g.scale(), rows, Options::current().round());
    let data = g.data()?;
    let data = data.reshape((rows, cols))?;
    let sums = match data.dtype() {
        DType::F64 => data.sum(0)?,
        _ => backend(data.device())?.sum_rows(&data, DType::F32)?,
    };
    let sums = convert(op, &sums, rule.data_factor, like.dtype())?;
    Scaled::new(sums, rule.scale).zeroed()
}
