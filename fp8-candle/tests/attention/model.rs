//! Attention as a running error analysis: result and gradients, from arguments that are exact in the dtype of the kernel.

use super::fp8::{Cast, cast_values};
use candle_core::DType;
use fp8_candle::ops::AttentionProducts;
use fp8_core::Format;
use fp8_test_support::approx::{Approx, additions, dot, sum};
use fp8_test_support::models::{exact, softmax, softmax_gradient};
use fp8_test_support::on_cuda;

/// Attention, heads first.
#[derive(Clone, Copy)]
pub struct Attention {
    /// tq, tk and d.
    pub sizes: [usize; 3],
    /// Heads of queries for each head of keys.
    pub group: usize,
    pub causal: bool,
    pub softmax_scale: f64,
    pub dtype: DType,
    /// The signs of the values are as good as random.
    pub random: bool,
    pub products: AttentionProducts,
}

impl Attention {
    /// Result and gradients of q, k and v, from these and the gradient of the result.
    pub fn run(self, [q, k, v, grad]: [Vec<f64>; 4]) -> [Vec<Approx>; 4] {
        let [tq, tk, d] = self.sizes;
        let AttentionProducts {
            format,
            grad_format,
            grad_inputs,
            ..
        } = self.products;
        let zeros = |len: usize| vec![Approx::exact(0.0); len];
        // What the products of scores, probabilities and gradients read.
        let cast = |x: &[f64], fp8: bool, format| cast_values(x, d, fp8.then_some(format));
        let probabilities = self.products.grad_probabilities;
        let [q_values, k_values] = [&q, &k].map(|x| cast(x, grad_inputs, format));
        let grad_values = cast(&grad, grad_inputs, grad_format);
        let [q, k] = [&q, &k].map(|x| cast(x, self.products.scores, format));
        let grad = cast(&grad, probabilities, grad_format);
        let v_probabilities = cast(&v, probabilities, format);
        let v = cast(&v, self.products.values, format);
        let [mut y, mut dq] = [vec![], vec![]];
        let [mut dk, mut dv] = [zeros(k.len()), zeros(v.len())];
        let pairs = q.chunks(tq * d).zip(grad.chunks(tq * d));
        let pairs: Vec<_> = pairs.collect();
        // The heads of queries that share a head of keys are consecutive.
        for (i, pairs) in pairs.chunks(self.group).enumerate() {
            let keys = i * tk * d..(i + 1) * tk * d;
            let (k, v) = (&k[keys.clone()], &v[keys.clone()]);
            let (k_values, v_grad) = (&k_values[keys.clone()], &v_probabilities[keys.clone()]);
            let (mut p, mut ds) = (vec![], vec![]);
            for &(q, grad) in pairs {
                for (row, (q, grad)) in q.chunks(d).zip(grad.chunks(d)).enumerate() {
                    let visible = if self.causal { row + tk - tq + 1 } else { tk };
                    let [forward, probabilities] = self.probabilities(q, &k[..visible * d]);
                    let forward = self.operands(forward, self.products.values, format);
                    let result = self.weighted(&forward, v, d);
                    let gradient = self.logit_gradient(&probabilities, &result, v_grad, grad);
                    let scaled = |x: Vec<Approx>| match grad_inputs {
                        true => {
                            let factor = Approx::constant(self.softmax_scale);
                            x.into_iter().map(|x| x * factor).collect()
                        }
                        false => x,
                    };
                    let gradient = self.operands(gradient, grad_inputs, grad_format);
                    dq.extend(scaled(self.weighted(&gradient, k_values, d)));
                    y.extend(result);
                    p.push(self.operands(probabilities, grad_inputs, format));
                    ds.push(scaled(gradient));
                }
            }
            let rows = i * self.group * tq * d..(i * self.group + pairs.len()) * tq * d;
            let (queries, grads) = (&q_values[rows.clone()], &grad_values[rows]);
            for key in 0..tk {
                let seen = (0..p.len()).filter(|&row| key < p[row].len());
                for col in 0..d {
                    let sum = |factors: &[Vec<Approx>], values: &[f64]| {
                        let value = |row: usize| Approx::exact(values[row * d + col]);
                        let terms = seen.clone().map(|row| (factors[row][key], value(row)));
                        dot(terms, p.len(), self.random)
                    };
                    let at = keys.start + key * d + col;
                    (dk[at], dv[at]) = (sum(&ds, queries), sum(&p, grads));
                }
            }
        }
        [y, dq, dk, dv]
    }

    /// A factor as kernels multiply it: rounded to the dtype of the operands. CPUs multiply f16 in f32.
    fn narrow(self, factor: Approx) -> Approx {
        match on_cuda() || self.dtype == DType::BF16 {
            true => factor.stored(self.dtype),
            false => factor,
        }
    }

    /// A row of factors as kernels multiply it: the values of FP8 codes, or rounded to the dtype of the operands.
    fn operands(self, row: Vec<Approx>, fp8: bool, format: Format) -> Vec<Approx> {
        match fp8 {
            true => Cast::new(format, self.dtype).row(&row),
            false => row.into_iter().map(|factor| self.narrow(factor)).collect(),
        }
    }

    /// Probabilities as a backward pass recomputes them from a log-sum-exp, which is about as large as the largest logit.
    fn recomputed(self, p: &[Approx], logits: &[Approx]) -> Vec<Approx> {
        let largest = logits.iter().fold(1.0, |a: f64, x| a.max(x.value.abs()));
        let size = largest * self.softmax_scale.abs() + (p.len() as f64).ln();
        p.iter().map(|p| p.rounded(4.0 * size)).collect()
    }

    /// Those of the forward and of the backward pass.
    fn probabilities(self, q: &[f64], k: &[f64]) -> [Vec<Approx>; 2] {
        let d = self.sizes[2];
        let logit = |k| dot(exact(q).zip(exact(k)), d, self.random);
        let logits: Vec<Approx> = k.chunks(d).map(logit).collect();
        let p = softmax(&logits, self.softmax_scale);
        let recomputed = self.recomputed(&p, &logits);
        // Kernels for a GPU also take powers of 2 in the forward pass.
        match on_cuda() {
            true => [recomputed.clone(), recomputed],
            false => [p, recomputed],
        }
    }

    /// The sum of the rows of `values` with these factors.
    fn weighted(self, factors: &[Approx], values: &[f64], d: usize) -> Vec<Approx> {
        let column = |col: usize| {
            let rows = values.chunks(d).map(|row| Approx::exact(row[col]));
            let factors = factors.iter().copied();
            dot(factors.zip(rows), self.sizes[1], self.random)
        };
        (0..d).map(column).collect()
    }

    /// The gradient of one query's dot products; of their casts, without the scale.
    fn logit_gradient(self, p: &[Approx], y: &[Approx], v: &[f64], grad: &[f64]) -> Vec<Approx> {
        let d = self.sizes[2];
        let dp = |v| dot(exact(grad).zip(exact(v)), d, self.random);
        let dp: Vec<Approx> = v.chunks(d).take(p.len()).map(dp).collect();
        if self.products.grad_inputs {
            return softmax_gradient(p, &dp, 1.0);
        }
        // With FP8 products every device sums P * dP.
        if !on_cuda() || self.products.any() {
            return softmax_gradient(p, &dp, self.softmax_scale);
        }
        // From the stored result: sum(p * dp) = sum(y * grad).
        let products = y
            .iter()
            .zip(exact(grad))
            .map(|(y, g)| y.stored(self.dtype) * g);
        let delta = sum(products, additions(d));
        let scale = Approx::constant(self.softmax_scale);
        let row = p.iter().zip(dp);
        row.map(|(&p, dp)| p * (dp - delta) * scale).collect()
    }
}
