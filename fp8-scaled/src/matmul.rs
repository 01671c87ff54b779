//! Matrix products.

use super::arith::{Like, broadcast_dims, common_dtype};
use super::check::check_same_device;
use super::error::{Result, shape, unsupported};
use super::kernels::convert;
use super::options::{MatmulPrecision, Options};
use super::value::Scaled;
use candle_core::{D, DType, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_candle::ops::detached::fp8_product;
use fp8_candle::ops::elements::matrix_dims;
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::scaled::matmul_rule;
use fp8_core::{Format, Granularity};

/// An operand and the dimension of its matrices that the product sums over.
pub(super) type Operand<'a> = (&'a Scaled, Contraction);

impl Scaled {
    /// The product of matrices `[.., m, k]` and `[.., k, n]`; leading dimensions broadcast. If the second operand is one matrix `[k, n]`, all
    /// leading dimensions of the first count as rows, and the gradient of the matrix sums over them. Scale: `a * b * r(sqrt(k))`.
    ///
    /// Two FP8 operands are multiplied in FP8 and give f16. Under [`MatmulPrecision::Fp8`] other operands are multiplied in FP8 too, and
    /// the result has their dtype. Sums are in f32, those of f64 data in f64.
    ///
    /// # Errors
    /// If shapes do not fit or the devices differ.
    pub fn matmul(&self, rhs: &Self) -> Result<Self> {
        self.matmul_to(rhs, common_dtype(self, rhs))
    }

    /// [`Scaled::matmul`] with the dtype of the result: f32 for FP8 operands, for example.
    ///
    /// # Errors
    /// As [`Scaled::matmul`], and if `dtype` is not f32, bf16, f16 or f64.
    pub fn matmul_to(&self, rhs: &Self, dtype: DType) -> Result<Self> {
        let op = "matmul";
        check_dtype(op, dtype)?;
        check_same_device(op, self, rhs)?;
        let (Some(k), Some(other)) = (last_dims(self, Cols), last_dims(rhs, Rows)) else {
            let low = if self.rank() < 2 { self } else { rhs };
            return Err(shape(
                op,
                "an operand",
                "at least two dimensions",
                low.dims(),
            ));
        };
        if k != other {
            return Err(shape(
                op,
                "the second operand",
                format!("[.., {k}, n], as the first operand has {:?}", self.dims()),
                rhs.dims(),
            ));
        }
        let (a, b) = (operand(self)?, operand(rhs)?);
        let is_matrix = rhs.rank() == 2;
        let product = move |a: Operand<'_>, b: Operand<'_>, dtype: DType| match is_matrix {
            true => matrix(a, b, dtype),
            false => batch(op, a, b, dtype),
        };
        let value = product((&a, Cols), (&b, Rows), dtype)?;
        let (a_like, b_like) = (Like::of(self), Like::of(rhs));
        // Each gradient needs the other operand.
        let (a, b) = (
            rhs.is_tracked().then_some(a),
            self.is_tracked().then_some(b),
        );
        Ok(Self::record(value, op, [self, rhs], move |g, _| {
            let g = cotangent(g)?;
            let grad_a = b
                .as_ref()
                .map(|b| a_like.cotangent(&product((&g, Cols), (b, Cols), a_like.dtype())?));
            let grad_b = a
                .as_ref()
                .map(|a| b_like.cotangent(&product((a, Rows), (&g, Rows), b_like.dtype())?));
            Ok([grad_a.transpose()?, grad_b.transpose()?])
        }))
    }
}

fn check_dtype(op: &'static str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        got => Err(unsupported(op, "the result", "f32, bf16, f16 or f64", got)),
    }
}

/// The size of the dimension that a product sums over.
fn last_dims(x: &Scaled, contraction: Contraction) -> Option<usize> {
    match (x.dims(), contraction) {
        ([.., _, cols], Cols) => Some(*cols),
        ([.., rows, _], Rows) => Some(*rows),
        _ => None,
    }
}

/// An operand of a forward product: in FP8 if it already is or the settings ask for it. The value keeps its FP8 copy for every product
/// that reads it.
pub(super) fn operand(x: &Scaled) -> Result<Scaled> {
    match Options::current().settings.matmul {
        MatmulPrecision::Fp8 { forward, .. } => cast(x, forward),
        _ => Ok(x.detach()),
    }
}

/// The cotangent of a product, cast once for the products with either operand.
pub(super) fn cotangent(g: &Scaled) -> Result<Scaled> {
    match Options::current().settings.matmul {
        MatmulPrecision::Fp8 { backward, .. } => cast(g, backward),
        _ => Ok(g.detach()),
    }
}

fn cast(x: &Scaled, format: Format) -> Result<Scaled> {
    match x.codes() {
        // FP8 data of any format are not rounded again.
        Some(_) => Ok(x.detach()),
        None => Ok(Scaled::new_fp8(x.cast(format)?.operand, x.scale())),
    }
}

/// The codes of both operands, if both have codes. Otherwise FP8 operands are decoded: only the settings decide whether the other one is
/// cast.
pub(super) fn both_codes<'a>(
    a: &'a Scaled,
    b: &'a Scaled,
) -> Option<(&'a Fp8Tensor, &'a Fp8Tensor)> {
    a.codes().zip(b.codes())
}

/// The product of two matrices, without a graph. Leading dimensions count as rows; the result has those of `a` if `a` is summed over its
/// columns.
pub(super) fn matrix(
    (a, a_contraction): Operand<'_>,
    (b, b_contraction): Operand<'_>,
    dtype: DType,
) -> Result<Scaled> {
    let options = Options::current();
    let (rows, cols) = matrix_dims(a.dims());
    let length = if a_contraction == Cols { cols } else { rows };
    let rule = matmul_rule(a.scale(), b.scale(), length, options.round());
    let codes = both_codes(a, b);
    options.count_matmul(codes.is_some());
    let product = match codes {
        Some((a, b)) => fp8_product(
            (a, a_contraction),
            (b, b_contraction),
            None,
            rule.data_factor,
            dtype,
        )?,
        None => {
            let wide = wide_dtype(a, b, dtype);
            let as_matrix = |x: &Scaled, turned: bool| -> Result<Tensor> {
                let x = x.float(wide)?.reshape(matrix_dims(x.dims()))?;
                Ok(if turned { x.t()? } else { x })
            };
            let (a, b) = (
                as_matrix(a, a_contraction == Rows)?,
                as_matrix(b, b_contraction == Cols)?,
            );
            convert("matmul", &a.matmul(&b)?, rule.data_factor, dtype)?
        }
    };
    let kept = product.dim(D::Minus1)?;
    let value = Scaled::new(product, rule.scale).zeroed()?;
    match (a.dims(), a_contraction) {
        ([lead @ .., _], Cols) if lead.len() > 1 => value.reshape(&[lead, &[kept]].concat()),
        _ => Ok(value),
    }
}

/// The dtype in which operands that are not FP8 are multiplied.
fn wide_dtype(a: &Scaled, b: &Scaled, dtype: DType) -> DType {
    match [a.compute_dtype(), b.compute_dtype(), dtype].contains(&DType::F64) {
        true => DType::F64,
        false => DType::F32,
    }
}

/// The products of two batches of matrices, whose leading dimensions broadcast.
fn batch(
    op: &'static str,
    (a, a_contraction): Operand<'_>,
    (b, b_contraction): Operand<'_>,
    dtype: DType,
) -> Result<Scaled> {
    let options = Options::current();
    let ([a_lead @ .., a_rows, a_cols], [b_lead @ .., b_rows, b_cols]) = (a.dims(), b.dims())
    else {
        super::error::internal!("{op}: operands without rows and columns");
    };
    let lead = broadcast_dims(op, a_lead, b_lead)?;
    let (length, m) = match a_contraction {
        Cols => (*a_cols, *a_rows),
        Rows => (*a_rows, *a_cols),
    };
    let n = match b_contraction {
        Cols => *b_rows,
        Rows => *b_cols,
    };
    let rule = matmul_rule(a.scale(), b.scale(), length, options.round());
    let count: usize = lead.iter().product();
    let spread = |x: Tensor, rows: usize, cols: usize| -> Result<Tensor> {
        let x = x.broadcast_as([lead.as_slice(), &[rows, cols]].concat())?;
        Ok(x.contiguous()?.reshape((count, rows, cols))?)
    };
    let codes = both_codes(a, b).filter(|_| count > 0);
    options.count_matmul(codes.is_some());
    let product = match codes {
        Some(_) => {
            let of =
                |x: &Scaled, rows: usize, cols: usize| x.moved(|x| spread(x.clone(), rows, cols));
            let (a, b) = (of(a, *a_rows, *a_cols)?, of(b, *b_rows, *b_cols)?);
            let Some((a, b)) = both_codes(&a, &b) else {
                super::error::internal!("{op}: moving codes has decoded them");
            };
            let (a, b) = ((a, a_contraction), (b, b_contraction));
            codes_batch(a, b, rule.data_factor, dtype)?
        }
        None => {
            let wide = wide_dtype(a, b, dtype);
            let a = spread(a.float(wide)?, *a_rows, *a_cols)?;
            let b = spread(b.float(wide)?, *b_rows, *b_cols)?;
            let a = if a_contraction == Rows { a.t()? } else { a };
            let b = if b_contraction == Cols { b.t()? } else { b };
            convert(op, &a.matmul(&b)?, rule.data_factor, dtype)?
        }
    };
    let value = Scaled::new(product, rule.scale).zeroed()?;
    value.reshape(&[lead.as_slice(), &[m, n]].concat())
}

/// `factor * a b` for each matrix of a batch, one GEMM after the other; a and b are `[batch, rows, cols]`.
fn codes_batch(
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
    let products = (0..a_codes.dim(0)?).map(|i| -> Result<Tensor> {
        let (a, b) = (part(a, a_codes, i)?, part(b, b_codes, i)?);
        let (a, b) = ((&a, a_contraction), (&b, b_contraction));
        Ok(fp8_product(a, b, None, factor, dtype)?)
    });
    Ok(Tensor::stack(&products.collect::<Result<Vec<_>>>()?, 0)?)
}
