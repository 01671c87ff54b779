//! The Cholesky factor of a symmetric positive definite matrix, a block of rows at a time, so that nearly all of the work is products of
//! matrices.

use crate::error::Result;
use candle_core::{DType, Device, Tensor};

/// Rows of a block.
pub(super) const BLOCK: usize = 96;

/// The lower triangle L with A = L Lᵀ, in f64.
pub(super) struct Factor {
    size: usize,
    /// A block of rows each, up to and with its square on the diagonal.
    rows: Vec<Tensor>,
    /// The inverses of these squares.
    inverses: Vec<Tensor>,
}

impl Factor {
    /// The factor of `a`, of which the lower triangle is read; None if `a` is not positive definite to rounding.
    pub(super) fn new(a: &Tensor) -> Result<Option<Self>> {
        let size = a.dim(0)?;
        let mut factor = Self {
            size,
            rows: vec![],
            inverses: vec![],
        };
        for start in (0..size).step_by(BLOCK) {
            let len = BLOCK.min(size - start);
            let a = a.narrow(0, start, len)?;
            let mut row: Vec<Tensor> = vec![];
            for (i, (other, inverse)) in factor.rows.iter().zip(&factor.inverses).enumerate() {
                let (from, len) = (i * BLOCK, inverse.dim(0)?);
                let mut part = a.narrow(1, from, len)?;
                if i > 0 {
                    let before = other.narrow(1, 0, from)?;
                    part = (part - Tensor::cat(&row, 1)?.matmul(&before.t()?)?)?;
                }
                row.push(part.contiguous()?.matmul(&inverse.t()?)?);
            }
            let mut square = a.narrow(1, start, len)?;
            if !row.is_empty() {
                let before = Tensor::cat(&row, 1)?;
                square = (square - before.matmul(&before.t()?)?)?;
            }
            let mut values = square.flatten_all()?.to_vec1::<f64>()?;
            if !small_factor(&mut values, len) {
                return Ok(None);
            }
            let inverse = small_inverse(&values, len);
            row.push(Tensor::from_vec(values, (len, len), &Device::Cpu)?);
            factor.rows.push(Tensor::cat(&row, 1)?);
            let inverse = Tensor::from_vec(inverse, (len, len), &Device::Cpu)?;
            factor.inverses.push(inverse);
        }
        Ok(Some(factor))
    }

    /// The diagonal of L.
    pub(super) fn diagonal(&self) -> Result<Vec<f64>> {
        let mut diagonal = Vec::with_capacity(self.size);
        for (i, row) in self.rows.iter().enumerate() {
            let row = row.to_vec2::<f64>()?;
            let rows = row.iter().enumerate();
            diagonal.extend(rows.map(|(j, values)| values[i * BLOCK + j]));
        }
        Ok(diagonal)
    }

    /// Lᵀ as a whole in f32, with zeros below the diagonal.
    pub(super) fn transposed(&self) -> Result<Tensor> {
        let rows = self.rows.iter().map(|row| {
            let rest = self.size - row.dim(1)?;
            row.to_dtype(DType::F32)?.pad_with_zeros(1, 0, rest)
        });
        let rows = rows.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&rows, 0)?.t()?.contiguous()?)
    }

    /// X with A X = `b`, `[size, n]` in f64.
    pub(super) fn solve(&self, b: &Tensor) -> Result<Tensor> {
        let mut forward: Vec<Tensor> = vec![];
        for (i, (row, inverse)) in self.rows.iter().zip(&self.inverses).enumerate() {
            let (start, len) = (i * BLOCK, inverse.dim(0)?);
            let mut part = b.narrow(0, start, len)?;
            if i > 0 {
                let before = row.narrow(1, 0, start)?;
                part = (part - before.matmul(&Tensor::cat(&forward, 0)?)?)?;
            }
            forward.push(inverse.matmul(&part.contiguous()?)?);
        }
        let mut solution = forward;
        for i in (0..self.rows.len()).rev() {
            let (start, len) = (i * BLOCK, self.inverses[i].dim(0)?);
            // What later blocks take from this one.
            for j in i + 1..self.rows.len() {
                let between = self.rows[j].narrow(1, start, len)?;
                let taken = between.t()?.matmul(&solution[j])?;
                solution[i] = (&solution[i] - taken)?;
            }
            solution[i] = self.inverses[i].t()?.matmul(&solution[i])?;
        }
        Ok(Tensor::cat(&solution, 0)?)
    }
}

/// Replaces a matrix by its factor; false if a pivot is not positive.
fn small_factor(a: &mut [f64], n: usize) -> bool {
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|p| a[i * n + p] * a[j * n + p]).sum();
            let rest = a[i * n + j] - dot;
            if i == j {
                if !(rest > 0. && rest.is_finite()) {
                    return false;
                }
                a[i * n + i] = rest.sqrt();
            } else {
                a[i * n + j] = rest / a[j * n + j];
            }
        }
        a[i * n + i + 1..(i + 1) * n].fill(0.);
    }
    true
}

/// The inverse of a lower triangle.
fn small_inverse(l: &[f64], n: usize) -> Vec<f64> {
    let mut inverse = vec![0.; n * n];
    for col in 0..n {
        inverse[col * n + col] = 1. / l[col * n + col];
        for row in col + 1..n {
            let dot: f64 = (col..row)
                .map(|p| l[row * n + p] * inverse[p * n + col])
                .sum();
            inverse[row * n + col] = -dot / l[row * n + row];
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix with known eigenvalues' sign: M Mᵀ and a bit of the identity.
    fn positive(n: usize) -> Tensor {
        let m = (0..n * n).map(|i| ((i * 7919 % 1009) as f64 / 1009.) - 0.5);
        let m = Tensor::from_iter(m, &Device::Cpu)
            .unwrap()
            .reshape((n, n))
            .unwrap();
        let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
        (m.matmul(&m.t().unwrap()).unwrap() + (eye * 0.1).unwrap()).unwrap()
    }

    fn largest(x: &Tensor) -> f64 {
        x.abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar()
            .unwrap()
    }

    #[test]
    fn factors_and_solutions_are_those_of_the_matrix() {
        for n in [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7] {
            let a = positive(n);
            let factor = Factor::new(&a).unwrap().unwrap();
            let lt = factor.transposed().unwrap().to_dtype(DType::F64).unwrap();
            let product = lt.t().unwrap().matmul(&lt).unwrap();
            assert!(
                largest(&(&product - &a).unwrap()) < 1e-6 * largest(&a),
                "{n}"
            );
            let diagonal = factor.diagonal().unwrap();
            let whole = lt.to_vec2::<f64>().unwrap();
            assert!((0..n).all(|i| (whole[i][i] - diagonal[i]).abs() < 1e-6 * diagonal[i]));
            let b = a.narrow(1, 0, n.min(3)).unwrap().contiguous().unwrap();
            let x = factor.solve(&b).unwrap();
            let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
            let eye = eye.narrow(1, 0, n.min(3)).unwrap();
            assert!(largest(&(x - eye).unwrap()) < 1e-8, "{n}");
        }
    }

    #[test]
    fn what_is_not_positive_definite_has_no_factor() {
        let n = BLOCK + 3;
        let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
        let flipped = (positive(n) - (eye * 1e4).unwrap()).unwrap();
        assert!(Factor::new(&flipped).unwrap().is_none());
    }
}
