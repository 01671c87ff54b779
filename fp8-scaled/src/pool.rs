//! Pooling.

use super::error::{Result, shape};
use super::kernels::convert;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops::elements::wide_dtype;
use fp8_candle::ops::max_pool2d;
use fp8_core::scaled::{Scale, constant_rule, mul_rule};

impl Scaled {
    /// The largest value of each `k x k` window of `[batch, channels, height, width]`, NaN if there is one in it. Windows do not overlap;
    /// incomplete ones at the edges are dropped. Scale: that of the input.
    ///
    /// # Errors
    /// If there are not four dimensions, or k is 0 or larger than the image.
    pub fn max_pool2d(&self, k: usize) -> Result<Self> {
        self.pool("max_pool2d", k, true)
    }

    /// The mean of each window, as [`Scaled::max_pool2d`]. Scale: that of the input.
    ///
    /// # Errors
    /// As [`Scaled::max_pool2d`].
    pub fn avg_pool2d(&self, k: usize) -> Result<Self> {
        self.pool("avg_pool2d", k, false)
    }

    fn pool(&self, op: &'static str, k: usize, max: bool) -> Result<Self> {
        let (&[_, _, height, width], true) = (self.dims(), k > 0) else {
            return Err(self.no_image(op, k));
        };
        if k > height || k > width {
            return Err(self.no_image(op, k));
        }
        let dtype = self.compute_dtype();
        let x = self.float(wide_dtype(dtype))?.contiguous()?;
        let y = if max {
            max_pool2d(&x, k)?
        } else {
            x.avg_pool2d(k)?
        };
        let value = Self::new(convert(op, &y, 1.0, dtype)?, self.scale()).zeroed()?;
        let dims = self.dims().to_vec();
        // Marks the largest elements of each window, all of them if several are equal or NaN.
        let largest = match max && self.is_recorded() {
            false => None,
            true => {
                let y = spread(&y, k)?;
                let x = windows(&x, &dims, k)?;
                Some((x.eq(&y)? + x.ne(&x)?)?)
            }
        };
        let (power, mantissa) = match max {
            true => (Scale::ONE, 1.0),
            false => constant_rule(1.0 / (k * k) as f64),
        };
        Ok(self.recorded(value, op, move |g| {
            let rule = mul_rule(g.scale(), power);
            let g = spread(&g.float(wide_dtype(dtype))?, k)?;
            let g = match &largest {
                Some(largest) => largest.where_cond(&g, &g.zeros_like()?)?,
                None => g,
            };
            let [height, width] = [dims[2], dims[3]];
            let (rows, cols) = (height / k * k, width / k * k);
            let g = g.reshape((dims[0], dims[1], rows, cols))?;
            let g = g
                .pad_with_zeros(2, 0, height - rows)?
                .pad_with_zeros(3, 0, width - cols)?;
            let data = convert(op, &g, mantissa * rule.data_factor, dtype)?;
            Self::new(data, rule.scale).zeroed()
        }))
    }

    fn no_image(&self, op: &'static str, k: usize) -> super::error::Error {
        shape(
            op,
            "the image",
            format!("[batch, channels, height, width] with windows of {k}"),
            self.dims(),
        )
    }
}

/// The windows of images of the shape `dims`, `[images, rows of windows, k, windows in a row, k]`.
fn windows(x: &Tensor, dims: &[usize], k: usize) -> Result<Tensor> {
    let &[batch, channels, height, width] = dims else {
        super::error::internal!("an image with {} dimensions", dims.len());
    };
    let (rows, cols) = (height / k, width / k);
    let x = x.narrow(2, 0, rows * k)?.narrow(3, 0, cols * k)?;
    Ok(x.contiguous()?
        .reshape((batch * channels, rows, k, cols, k))?)
}

/// Repeats each window's value at all of its elements.
fn spread(y: &Tensor, k: usize) -> Result<Tensor> {
    let (batch, channels, rows, cols) = y.dims4()?;
    let images = batch * channels;
    let y = y.reshape((images, rows, 1, cols, 1))?;
    Ok(y.broadcast_as((images, rows, k, cols, k))?.contiguous()?)
}
