//! Layers with inputs, and what the search minimizes for them, in f64.

use candle_core::{DType, Device, Tensor};
use fp8_core::Granularity;
use fp8_files::scheme::{InputScheme, LayerScheme};
use fp8_files::search::{InputProducts, PreparedInputs, SearchOptions, Searched, search_weight};

/// Inputs of some tokens as they are meant and as they are multiplied, and a weight; row-major.
pub struct Case {
    pub tokens: usize,
    pub k: usize,
    pub n: usize,
    pub meant: Vec<f64>,
    pub multiplied: Vec<f64>,
    pub weight: Vec<f64>,
}

impl Case {
    /// Inputs with a few common directions, as those of models are, and of very different sizes.
    pub fn new(tokens: usize, k: usize, n: usize, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        let mut next = move || {
            // A sum of four uniform numbers, from an xorshift.
            let sum: f64 = (0..4)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
                })
                .sum();
            f64::from(sum as f32)
        };
        let directions: Vec<f64> = (0..3 * k).map(|_| next()).collect();
        let sizes: Vec<f64> = (0..k).map(|_| (next() * 2.).exp()).collect();
        let mut meant = vec![];
        for _ in 0..tokens {
            let along = [next(), next(), next()];
            for i in 0..k {
                let common: f64 = (0..3).map(|d| along[d] * directions[d * k + i]).sum();
                meant.push(f64::from((sizes[i] * (common + 0.2 * next())) as f32));
            }
        }
        let noisy = meant
            .iter()
            .map(|x| f64::from((x * (1. + 0.05 * next())) as f32));
        let multiplied = noisy.collect();
        let weight = (0..n * k).map(|_| next()).collect();
        Self {
            tokens,
            k,
            n,
            meant,
            multiplied,
            weight,
        }
    }

    /// A case of the tokens after the first ones, which this one keeps.
    pub fn split_off(&mut self, tokens: usize) -> Self {
        let rest = Self {
            tokens: self.tokens - tokens,
            meant: self.meant.split_off(tokens * self.k),
            multiplied: self.multiplied.split_off(tokens * self.k),
            weight: self.weight.clone(),
            ..*self
        };
        self.tokens = tokens;
        rest
    }

    pub fn tensor(&self, values: &[f64], rows: usize) -> Tensor {
        let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        Tensor::from_vec(values, (rows, self.k), &Device::Cpu).unwrap()
    }

    pub fn products(&self) -> InputProducts {
        let mut products = InputProducts::new(self.k).unwrap();
        let x = self.tensor(&self.multiplied, self.tokens);
        products
            .add(&x, &self.tensor(&self.meant, self.tokens))
            .unwrap();
        products
    }

    pub fn search(&self, granularity: Granularity) -> Searched {
        let weight = self.tensor(&self.weight, self.n);
        let options = SearchOptions::new();
        let inputs = PreparedInputs::new(&self.products(), &options, "fc").unwrap();
        search_weight(&weight, granularity, &inputs, "fc").unwrap()
    }

    /// Products of the inputs that are multiplied with others.
    pub fn product(&self, other: &[f64]) -> Vec<Vec<f64>> {
        let (k, x) = (self.k, &self.multiplied);
        let sum = |i: usize, j: usize| -> f64 {
            (0..self.tokens)
                .map(|t| x[t * k + i] * other[t * k + j])
                .sum()
        };
        let row = |i: usize| (0..k).map(|j| sum(i, j)).collect();
        (0..k).map(row).collect()
    }

    /// Products of the inputs that are multiplied, with a part of each square added to it.
    pub fn damped(&self, damping: f64) -> Vec<Vec<f64>> {
        let mut own = self.product(&self.multiplied);
        for (i, row) in own.iter_mut().enumerate() {
            row[i] *= 1. + damping;
        }
        own
    }

    /// The weights that make up for what is missing in the inputs.
    pub fn target(&self) -> Vec<f64> {
        let missing: Vec<f64> = (self.meant.iter())
            .zip(&self.multiplied)
            .map(|(x, y)| x - y)
            .collect();
        let (missing, inverse) = (self.product(&missing), inverse(&self.damped(10.)));
        let times = |a: &[Vec<f64>], w: &[f64]| -> Vec<f64> {
            a.iter()
                .map(|row| row.iter().zip(w).map(|(a, w)| a * w).sum())
                .collect()
        };
        let rows = self.weight.chunks(self.k).flat_map(|w| {
            let added = times(&inverse, &times(&missing, w));
            w.iter().zip(added).map(|(w, a)| w + a).collect::<Vec<_>>()
        });
        rows.collect()
    }

    /// The sum of squared errors of the outputs for weights `q` against those of `target`, and the damping's part.
    pub fn error(&self, q: &[f64], target: &[f64]) -> f64 {
        let (k, mut error) = (self.k, 0.);
        for (q, w) in q.chunks(k).zip(target.chunks(k)) {
            for x in self.multiplied.chunks(k) {
                let of = |i: usize| x[i] * (q[i] - w[i]);
                error += (0..k).map(of).sum::<f64>().powi(2);
                error += SearchOptions::new().damping * (0..k).map(|i| of(i).powi(2)).sum::<f64>();
            }
        }
        error
    }

    /// The sum of squared differences of the outputs for weights `q` from the meant ones.
    pub fn true_error(&self, q: &[f64]) -> f64 {
        let k = self.k;
        let mut error = 0.;
        for (q, w) in q.chunks(k).zip(self.weight.chunks(k)) {
            for (x, y) in self.multiplied.chunks(k).zip(self.meant.chunks(k)) {
                error += (0..k)
                    .map(|i| x[i] * q[i] - y[i] * w[i])
                    .sum::<f64>()
                    .powi(2);
            }
        }
        error
    }

    pub fn plain(&self, granularity: Granularity) -> Vec<f64> {
        let scheme = LayerScheme {
            weight: granularity,
            input: InputScheme::None,
        };
        let weight = self.tensor(&self.weight, self.n);
        let codes = scheme.quantize(&weight, None, false, "fc").unwrap();
        values(&codes.dequantize(DType::F32).unwrap())
    }
}

pub fn values(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    x.to_vec1().unwrap()
}

/// The inverse by Gauss and Jordan.
pub fn inverse(a: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = a.len();
    let mut rows: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let unit = (0..n).map(|j| f64::from(u8::from(i == j)));
            a[i].iter().copied().chain(unit).collect()
        })
        .collect();
    for i in 0..n {
        let largest = (i..n).max_by(|a, b| rows[*a][i].abs().total_cmp(&rows[*b][i].abs()));
        rows.swap(i, largest.unwrap());
        let pivot = rows[i][i];
        rows[i].iter_mut().for_each(|x| *x /= pivot);
        for other in (0..n).filter(|other| *other != i) {
            let (taken, factor) = (rows[i].clone(), rows[other][i]);
            for (x, taken) in rows[other].iter_mut().zip(taken) {
                *x -= factor * taken;
            }
        }
    }
    rows.into_iter().map(|row| row[n..].to_vec()).collect()
}
