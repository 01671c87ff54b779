//! `candle_nn::rotary_emb`, differentiable. The inputs need not be contiguous.

pub use candle_nn::rotary_emb::*;

use candle_core::{D, Result, Tensor};
use fp8_candle::ops;

/// Rotary position embedding, half-split: rotates the pair `(x[j], x[j + d/2])`.
///
/// # Shapes
/// `xs` `[b, h, t, d]` with even `d`, `cos` and `sin` `[t, d/2]`, or `[b, t, d/2]` with angles for each row of the batch; more
/// rows than `t` are ignored. Result `[b, h, t, d]`.
///
/// # Errors
/// If shapes, dtypes or devices are incompatible.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    if !per_row(cos, sin) {
        return Ok(ops::rope(xs, cos, sin)?);
    }
    check_rows(xs, cos, sin)?;
    let half = xs.dim(D::Minus1)? / 2;
    let parts = [
        xs.narrow(D::Minus1, 0, half)?,
        xs.narrow(D::Minus1, half, half)?,
    ];
    let [first, second] = rotated(parts, cos, sin)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// Rotary position embedding, interleaved: as [`rope`], on the pairs `(x[2j], x[2j + 1])`.
///
/// # Shapes
/// As [`rope`].
///
/// # Errors
/// As [`rope`].
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    if !per_row(cos, sin) {
        return Ok(ops::rope_i(xs, cos, sin)?);
    }
    check_rows(xs, cos, sin)?;
    let (b, h, t, d) = xs.dims4()?;
    let pairs = xs.reshape((b, h, t, d / 2, 2))?;
    let parts = [
        pairs.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?,
        pairs.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)?,
    ];
    let [first, second] = rotated(parts, cos, sin)?;
    Tensor::stack(&[first, second], D::Minus1)?.reshape((b, h, t, d))
}

/// [`rope`] for tensors that have tokens before heads.
///
/// # Shapes
/// `xs` `[b, t, h, d]`, the rest as [`rope`]. Result `[b, t, h, d]`, contiguous.
///
/// # Errors
/// As [`rope`].
pub fn rope_thd(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope(&xs.transpose(1, 2)?, cos, sin)?
        .transpose(1, 2)?
        .contiguous()
}

/// Whether each row of the batch has angles of its own.
fn per_row(cos: &Tensor, sin: &Tensor) -> bool {
    cos.rank() == 3 || sin.rank() == 3
}

/// Checks the angles of `xs` `[b, h, t, d]`: broadcasting and narrowing would take wider tables, such as those of all `d` features, and
/// more rows than the batch has.
fn check_rows(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    let (b, _, t, d) = xs.dims4()?;
    for (what, angles) in [("cos", cos), ("sin", sin)] {
        let fits = match *angles.dims() {
            [rows, half] => rows >= t && 2 * half == d,
            [batch, rows, half] => (batch == b || batch == 1) && rows >= t && 2 * half == d,
            _ => false,
        };
        if !fits {
            return Err(fp8_candle::Error::Shape {
                op: "rope",
                what,
                expected: format!(
                    "[{t}, d / 2] or [{b}, {t}, d / 2], or more positions, with an even d, here {d}"
                ),
                got: angles.dims().to_vec(),
            }
            .into());
        }
    }
    Ok(())
}

/// Both members of each pair, `[b, h, t, d/2]`, rotated by the angles of their row.
fn rotated([first, second]: [Tensor; 2], cos: &Tensor, sin: &Tensor) -> Result<[Tensor; 2]> {
    let (_, _, t, half) = first.dims4()?;
    let angles = |x: &Tensor| {
        let x = match x.rank() {
            2 => x.unsqueeze(0)?,
            _ => x.clone(),
        };
        // `[b, 1, t, d/2]`: the same for every head.
        x.narrow(1, 0, t)?.narrow(2, 0, half)?.unsqueeze(1)
    };
    let (cos, sin) = (angles(cos)?, angles(sin)?);
    Ok([
        (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?,
        (first.broadcast_mul(&sin)? + second.broadcast_mul(&cos)?)?,
    ])
}
