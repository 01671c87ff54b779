//! Dense layers by loops in f64, on random axes, with the bound of an f32 sum for each element.

use fp8_core::{Cast, Format, dynamic_quant_scale, floor_to_power_of_two, reciprocal};
use fp8_recipes::nn::DenseConfig;
use fp8_test_support::rounding;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// The shape of an input, and what a layer does with it.
#[derive(Debug, Clone)]
pub struct Case {
    pub shape: Vec<usize>,
    pub axis: Vec<isize>,
    pub batch_axis: Vec<isize>,
    pub features: Vec<usize>,
    pub bias: bool,
}

impl Case {
    /// A case that depends on the seed alone: one to five dimensions of one to five, any of them contracted or batch axes, in any order,
    /// counted from either end.
    pub fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rank = rng.random_range(1..6usize);
        let shape: Vec<usize> = (0..rank).map(|_| rng.random_range(1..6)).collect();
        let mut order: Vec<usize> = (0..rank).collect();
        order.shuffle(&mut rng);
        let contracted = rng.random_range(1..=rank);
        let batch = rng.random_range(0..=rank - contracted);
        let mut signed = |axes: &[usize]| -> Vec<isize> {
            let signed = axes.iter().map(|&axis| match rng.random::<bool>() {
                true => axis as isize,
                false => axis as isize - rank as isize,
            });
            signed.collect()
        };
        let axis = signed(&order[..contracted]);
        let batch_axis = signed(&order[contracted..contracted + batch]);
        Self {
            shape,
            axis,
            batch_axis,
            features: (0..rng.random_range(1..4))
                .map(|_| rng.random_range(1..5))
                .collect(),
            bias: rng.random(),
        }
    }

    pub fn config(&self) -> DenseConfig {
        DenseConfig::new(self.features.clone())
            .with_axis(self.axis.clone())
            .with_batch_axis(self.batch_axis.clone())
            .with_bias(self.bias)
    }

    /// Batch, other and contracted dimensions of the input.
    fn dims(&self) -> [Vec<usize>; 3] {
        let rank = self.shape.len() as isize;
        let at = |axes: &[isize]| -> Vec<usize> {
            let mut at: Vec<usize> = axes
                .iter()
                .map(|&axis| axis.rem_euclid(rank) as usize)
                .collect();
            at.sort();
            at
        };
        let (batch, contracted) = (at(&self.batch_axis), at(&self.axis));
        let other = |i: &usize| !batch.contains(i) && !contracted.contains(i);
        let others = (0..self.shape.len()).filter(other).collect();
        [batch, others, contracted]
    }

    fn sizes(&self, dims: &[usize]) -> Vec<usize> {
        dims.iter().map(|&at| self.shape[at]).collect()
    }

    pub fn kernel_dims(&self) -> Vec<usize> {
        let [batch, _, contracted] = self.dims().map(|dims| self.sizes(&dims));
        [batch, contracted, self.features.clone()].concat()
    }

    pub fn bias_dims(&self) -> Vec<usize> {
        [self.sizes(&self.dims()[0]), self.features.clone()].concat()
    }

    pub fn result_dims(&self) -> Vec<usize> {
        let [batch, others, _] = self.dims().map(|dims| self.sizes(&dims));
        [batch, others, self.features.clone()].concat()
    }

    /// Batch entries, rows of an entry, contracted values, features.
    pub fn counts(&self) -> [usize; 4] {
        let [b, m, k] = self.dims().map(|dims| self.sizes(&dims).iter().product());
        [b, m, k, self.features.iter().product()]
    }

    /// For each element of the input, its place in `[B, M, K]`.
    pub fn places(&self) -> Vec<usize> {
        let dims = self.dims();
        let count: usize = self.shape.iter().product();
        let place = |flat: usize| {
            let mut index = vec![0; self.shape.len()];
            let mut left = flat;
            for at in (0..self.shape.len()).rev() {
                index[at] = left % self.shape[at];
                left /= self.shape[at];
            }
            let order = dims.iter().flatten();
            order.fold(0, |place, &at| place * self.shape[at] + index[at])
        };
        (0..count).map(place).collect()
    }
}

/// A sum in f64, and how far one in f32 may be from it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum {
    pub value: f64,
    len: usize,
    magnitude: f64,
    square: f64,
}

impl Sum {
    fn add(&mut self, a: f64, b: f64) {
        self.value += a * b;
        self.len += 1;
        self.magnitude += (a * b).abs();
        self.square += (a * b).powi(2);
    }

    pub fn bound(&self) -> f64 {
        rounding::product_bound(self.len, self.magnitude, self.square)
    }
}

/// Which values of `[B, rows, cols]` share a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scales {
    Whole,
    Rows,
    Cols,
}

/// A cast: format, scales, whether they are powers of two.
pub type CastOf = (Format, Scales, bool);

/// The values after a cast, by the scalar definitions.
pub fn cast(
    values: &[f64],
    [b, rows, cols]: [usize; 3],
    (format, scales, rounded): CastOf,
) -> Vec<f64> {
    let group = |i: usize| match scales {
        Scales::Whole => 0,
        Scales::Rows => i / cols,
        Scales::Cols => i / (rows * cols) * cols + i % cols,
    };
    let mut amaxes = vec![0f32; b * rows.max(cols) * rows.max(cols) + 1];
    for (i, value) in values.iter().enumerate() {
        let amax = &mut amaxes[group(i)];
        *amax = amax.max(value.abs() as f32);
    }
    let through = |(i, &value): (usize, &f64)| {
        let exact = dynamic_quant_scale(amaxes[group(i)], format);
        let scale = if rounded {
            floor_to_power_of_two(exact)
        } else {
            exact
        };
        let code = Cast::new(format).encode(value as f32 * scale, 0);
        let mut decoded = [0f32];
        fp8_core::decode(format, &[code], 1., &mut decoded);
        f64::from(decoded[0]) * f64::from(reciprocal(scale))
    };
    values.iter().enumerate().map(through).collect()
}

/// The operands of the three products, each as its product sees it: x `[B, M, K]`, kernel `[B, K, N]`, gradient `[B, M, N]`.
pub struct Operands {
    pub output: [Vec<f64>; 2],
    pub grad_input: [Vec<f64>; 2],
    pub grad_kernel: [Vec<f64>; 2],
}

/// Result, gradient of x `[B, M, K]`, gradient of the kernel.
pub fn products(
    [b, m, k, n]: [usize; 4],
    operands: &Operands,
    bias: Option<&[f64]>,
) -> [Vec<Sum>; 3] {
    let mut y = vec![Sum::default(); b * m * n];
    let mut gx = vec![Sum::default(); b * m * k];
    let mut gk = vec![Sum::default(); b * k * n];
    for e in 0..b {
        for i in 0..m {
            for j in 0..n {
                let at = (e * m + i) * n + j;
                for l in 0..k {
                    let (x, w) = ((e * m + i) * k + l, (e * k + l) * n + j);
                    y[at].add(operands.output[0][x], operands.output[1][w]);
                    gx[x].add(operands.grad_input[0][at], operands.grad_input[1][w]);
                    gk[w].add(operands.grad_kernel[0][at], operands.grad_kernel[1][x]);
                }
                if let Some(bias) = bias {
                    y[at].add(bias[e * n + j], 1.);
                }
            }
        }
    }
    [y, gx, gk]
}

/// The gradient of the bias: the sum of `[B, M, N]` over M.
pub fn bias_gradient([b, m, _, n]: [usize; 4], gradient: &[f64]) -> Vec<Sum> {
    let mut sums = vec![Sum::default(); b * n];
    for e in 0..b {
        for i in 0..m {
            for j in 0..n {
                sums[e * n + j].add(gradient[(e * m + i) * n + j], 1.);
            }
        }
    }
    sums
}
