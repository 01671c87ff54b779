//! Products over dimensions.

use super::check::check_dims;
use super::error::Result;
use super::value::Scaled;
use candle_core::{D, DType, Tensor};
use fp8_core::scaled::{mul_rule, powi_rule};

impl Scaled {
    /// The product over `dims`, which stay with the size 1. Scale: `s^n` for products of n values. Multiplied in f64.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn prod_keepdim(&self, dims: &[usize]) -> Result<Self> {
        let op = "prod";
        check_dims(op, self, dims)?;
        let (x, dtype) = (self.detach().zeroed()?, self.compute_dtype());
        // The dimensions that stay, then the others, as rows.
        let (mut order, mut kept) = (Vec::new(), x.dims().to_vec());
        order.extend((0..x.rank()).filter(|dim| !dims.contains(dim)));
        let inner = order.len();
        order.extend((0..x.rank()).filter(|dim| dims.contains(dim)));
        let ordered: Vec<usize> = order.iter().map(|&dim| x.dims()[dim]).collect();
        let length: usize = ordered[inner..].iter().product();
        let rows: usize = ordered[..inner].iter().product();
        dims.iter().for_each(|&dim| kept[dim] = 1);

        let mut inverse = vec![0; order.len()];
        for (place, &dim) in order.iter().enumerate() {
            inverse[dim] = place;
        }
        let moved = move |x: &Self| -> Result<Tensor> {
            let x = x.float(DType::F64)?.permute(order.as_slice())?;
            Ok(x.reshape((rows, length))?)
        };
        let exponent = i32::try_from(length).unwrap_or(i32::MAX);
        let rule = powi_rule(x.scale(), exponent)?;
        let product = times(&all(&moved(&x)?)?, f64::from(rule.data_factor))?;
        let value = Self::new(product.to_dtype(dtype)?.reshape(kept)?, rule.scale).zeroed()?;
        Ok(self.recorded(value, op, move |g| {
            let others = powi_rule(x.scale(), (exponent - 1).max(0))?;
            let rule = mul_rule(g.scale(), others.scale);
            let factor = f64::from(others.data_factor) * f64::from(rule.data_factor);
            let shape = x.dims();
            let g = Self::new(g.float(DType::F64)?.broadcast_as(shape)?, g.scale());
            let slope = times(&(moved(&g)? * others_of(&moved(&x)?)?)?, factor)?;
            // Back to where the elements were.
            let slope = slope
                .reshape(ordered.as_slice())?
                .permute(inverse.as_slice())?;
            Self::new(slope.to_dtype(dtype)?, rule.scale).zeroed()
        }))
    }
}

/// `x * factor`, where zeros stay zeros even if the product of the scales overflows to Inf.
fn times(x: &Tensor, factor: f64) -> Result<Tensor> {
    Ok(x.eq(0.0)?.where_cond(x, &(x * factor)?)?)
}

/// The products of the rows of a matrix, by halves.
fn all(x: &Tensor) -> Result<Tensor> {
    let mut x = x.clone();
    loop {
        let n = x.dim(D::Minus1)?;
        match n {
            0 => return Ok(Tensor::ones((x.dim(0)?, 1), DType::F64, x.device())?),
            1 => return Ok(x),
            _ => {
                let half = n / 2;
                let pairs = (x.narrow(1, 0, half)? * x.narrow(1, half, half)?)?;
                x = match n % 2 {
                    0 => pairs,
                    _ => Tensor::cat(&[&pairs, &x.narrow(1, n - 1, 1)?], 1)?,
                };
            }
        }
    }
}

/// For each element of a row of a matrix the product of the others: those before times those after. A quotient would fail
/// where elements are 0.
fn others_of(x: &Tensor) -> Result<Tensor> {
    let before = before(x)?;
    let behind = self::before(&x.flip(&[1])?)?.flip(&[1])?;
    Ok((before * behind)?)
}

/// For each element of a row the product of those before it.
fn before(x: &Tensor) -> Result<Tensor> {
    let (rows, n) = x.dims2()?;
    let ones = |n| Tensor::ones((rows, n), DType::F64, x.device());
    let shifted = |x: &Tensor, by: usize| -> Result<Tensor> {
        Ok(Tensor::cat(&[&ones(by)?, &x.narrow(1, 0, n - by)?], 1)?)
    };
    if n == 0 {
        return Ok(x.clone());
    }
    // Each pass doubles how far back a product reaches.
    let (mut product, mut reach) = (shifted(x, 1)?, 1);
    while reach < n {
        product = (&product * shifted(&product, reach)?)?;
        reach *= 2;
    }
    Ok(product)
}
