//! The differentiable building blocks as running error analyses: results and gradients, from arguments that are exact in the
//! dtype of the kernel. Rows are flat.

use crate::approx::{Approx, additions, sum, sum_random};
use crate::on_cuda;
use candle_core::DType;

/// A building block with the parameters that are not tensors.
pub enum Model {
    /// LayerNorm or RMSNorm of x, weight and bias.
    Norm(Norm),
    /// Over the last dimension, of this size.
    Softmax(usize),
    /// `[tq, tk]` and softmax_scale.
    CausalSoftmax([usize; 2], f64),
    /// Rotary embedding of x by cos and sin.
    Rope(Rope),
    /// GELU by tanh.
    Gelu,
    /// The class of each position, `None` for ignored ones.
    CrossEntropy(Vec<Option<usize>>),
}

impl Model {
    /// The result.
    pub fn forward(&self, args: &[Vec<f64>]) -> Vec<Approx> {
        let x = &args[0];
        match self {
            Self::Norm(norm) => norm.forward(x, &args[1], args.get(2).map(|bias| &bias[..])),
            Self::Softmax(cols) => causal_softmax(x, [1, *cols], 1.0),
            Self::CausalSoftmax(sizes, scale) => causal_softmax(x, *sizes, *scale),
            Self::Rope(rope) => rope.rotate(x, &args[1], &args[2], 1.0),
            Self::Gelu => gelu(x),
            Self::CrossEntropy(targets) => vec![cross_entropy(x, targets)],
        }
    }

    /// The gradient of each argument, from a gradient of the result that is exact.
    pub fn backward(&self, args: &[Vec<f64>], grad: &[f64], dtype: DType) -> Vec<Vec<Approx>> {
        let x = &args[0];
        match self {
            Self::Norm(norm) => {
                let mut gradients = norm.backward(x, &args[1], grad).to_vec();
                gradients.truncate(args.len());
                gradients
            }
            Self::Softmax(cols) => vec![causal_softmax_gradient(x, [1, *cols], grad, 1.0, dtype)],
            Self::CausalSoftmax(sizes, scale) => {
                vec![causal_softmax_gradient(x, *sizes, grad, *scale, dtype)]
            }
            Self::Rope(rope) => {
                let [cos, sin] = rope.angles(x, grad, args[1].len() / (rope.d / 2));
                vec![rope.rotate(grad, &args[1], &args[2], -1.0), cos, sin]
            }
            Self::Gelu => vec![gelu_gradient(x, grad)],
            Self::CrossEntropy(targets) => vec![cross_entropy_gradient(x, targets, grad[0])],
        }
    }
}

/// These numbers without errors.
pub fn exact(values: &[f64]) -> impl Iterator<Item = Approx> + Clone + '_ {
    values.iter().map(|&value| Approx::exact(value))
}

fn one() -> Approx {
    Approx::exact(1.0)
}

/// LayerNorm (`center`) or RMSNorm.
#[derive(Clone, Copy)]
pub struct Norm {
    /// LayerNorm: the mean is subtracted.
    pub center: bool,
    /// What is added to the variance.
    pub eps: f64,
}

impl Norm {
    /// `x - mean` and the reciprocal standard deviation.
    fn centered(self, x: &[f64]) -> (Vec<Approx>, Approx) {
        let (count, additions) = (Approx::exact(x.len() as f64), additions(x.len()));
        let centered: Vec<Approx> = match self.center {
            true => {
                let mean = sum(exact(x), additions) / count;
                exact(x).map(|x| x - mean).collect()
            }
            false => exact(x).collect(),
        };
        let variance = sum(centered.iter().map(|&x| x * x), additions) / count;
        // A reciprocal square root of a GPU is within 2 ulp.
        let deviation = (variance + Approx::constant(self.eps)).sqrt().rounded(2.0);
        (centered, one() / deviation)
    }

    /// The result.
    pub fn forward(self, x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<Approx> {
        let mut y = vec![];
        for x in x.chunks(weight.len()) {
            let (centered, inverse) = self.centered(x);
            for (i, x) in centered.into_iter().enumerate() {
                let scaled = x * inverse * Approx::exact(weight[i]);
                y.push(match bias {
                    Some(bias) => scaled + Approx::exact(bias[i]),
                    None => scaled,
                });
            }
        }
        y
    }

    /// Gradients of x, weight and bias.
    pub fn backward(self, x: &[f64], weight: &[f64], grad: &[f64]) -> [Vec<Approx>; 3] {
        let cols = weight.len();
        let (count, additions) = (Approx::exact(cols as f64), additions(cols));
        let mut dx = vec![];
        let mut normed = vec![];
        for (x, grad) in x.chunks(cols).zip(grad.chunks(cols)) {
            let (centered, inverse) = self.centered(x);
            let g: Vec<Approx> = exact(grad).zip(exact(weight)).map(|(g, w)| g * w).collect();
            let mean_g = match self.center {
                true => sum(g.iter().copied(), additions) / count,
                false => Approx::exact(0.0),
            };
            let products = g.iter().zip(&centered).map(|(&g, &x)| g * x);
            let mean_gn = sum(products, additions) * inverse / count;
            for (&g, &x) in g.iter().zip(&centered) {
                let n = x * inverse;
                normed.push(n);
                dx.push((g - mean_g - n * mean_gn) * inverse);
            }
        }
        let rows = x.len() / cols;
        let column = |col| (0..rows).map(move |row| row * cols + col);
        let dw = |col| {
            let terms = column(col).map(|i| Approx::exact(grad[i]) * normed[i]);
            sum_random(terms, rows)
        };
        // The caller's gradients may all have one sign in a column.
        let db = |col| sum(column(col).map(|i| Approx::exact(grad[i])), rows);
        let [dw, db] = [
            (0..cols).map(dw).collect(),
            (0..cols).map(db).collect::<Vec<_>>(),
        ];
        [dx, dw, db]
    }
}

/// `softmax(softmax_scale * x)` of one row.
pub fn softmax(x: &[Approx], softmax_scale: f64) -> Vec<Approx> {
    let scale = Approx::constant(softmax_scale);
    let (terms, total) = exponentials(x.iter().map(|&x| x * scale).collect());
    terms.into_iter().map(|term| term / total).collect()
}

/// Exponentials relative to the largest, and their sum.
fn exponentials(x: Vec<Approx>) -> (Vec<Approx>, Approx) {
    let largest = x
        .iter()
        .copied()
        .reduce(|a, b| if b.value > a.value { b } else { a });
    let largest = largest.expect("a row has elements");
    let smallest = x.iter().fold(f64::INFINITY, |a, x| a.min(x.value));
    let terms: Vec<Approx> = x.into_iter().map(|x| (x - largest).exp()).collect();
    let total = sum(terms.iter().copied(), additions(terms.len()));
    let rescaled = match on_cuda() {
        // When a running maximum grows, which it can at every 32 terms, the sum is multiplied by an exponential.
        true => (terms.len().div_ceil(32) + 1) as f64 * (5.0 + 2.0 * (largest.value - smallest)),
        false => 0.0,
    };
    let total = total.rounded(rescaled);
    (terms, total)
}

/// The gradient of one row of logits from the stored result.
pub fn softmax_gradient(y: &[Approx], grad: &[Approx], softmax_scale: f64) -> Vec<Approx> {
    let products = y.iter().zip(grad).map(|(&y, &grad)| y * grad);
    let dot = sum(products, additions(y.len()));
    let scale = Approx::constant(softmax_scale);
    let row = y.iter().zip(grad);
    row.map(|(&y, &grad)| y * (grad - dot) * scale).collect()
}

/// Matrices `[tq, tk]`: the softmax over the visible keys, 0 for the others.
pub fn causal_softmax(x: &[f64], [tq, tk]: [usize; 2], softmax_scale: f64) -> Vec<Approx> {
    let mut y = vec![];
    for (row, x) in x.chunks(tk).enumerate() {
        let visible: Vec<Approx> = exact(&x[..row % tq + tk - tq + 1]).collect();
        y.extend(softmax(&visible, softmax_scale));
        y.resize((row + 1) * tk, Approx::exact(0.0));
    }
    y
}

/// The gradient of the logits of [`causal_softmax`], from the stored result.
pub fn causal_softmax_gradient(
    x: &[f64],
    [tq, tk]: [usize; 2],
    grad: &[f64],
    softmax_scale: f64,
    dtype: DType,
) -> Vec<Approx> {
    let y = causal_softmax(x, [tq, tk], softmax_scale);
    let mut dx = vec![];
    for (row, (y, grad)) in y.chunks(tk).zip(grad.chunks(tk)).enumerate() {
        let visible = row % tq + tk - tq + 1;
        let y: Vec<Approx> = y[..visible].iter().map(|y| y.stored(dtype)).collect();
        let grad: Vec<Approx> = exact(&grad[..visible]).collect();
        dx.extend(softmax_gradient(&y, &grad, softmax_scale));
        dx.resize((row + 1) * tk, Approx::exact(0.0));
    }
    dx
}

/// sigmoid(2u), its derivative, and the derivative of 2u, with `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
fn gelu_parts(x: f64) -> [Approx; 3] {
    let linear = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let cubic = linear * 0.044_715;
    let x = Approx::exact(x);
    let polynomial = |cubic| x * x * Approx::constant(cubic) + Approx::constant(linear);
    let v = polynomial(cubic) * x;
    let e = (Approx::exact(0.0) - v.abs()).exp();
    let d = one() / (one() + e);
    let sigmoid = if v.value < 0.0 { e * d } else { d };
    [sigmoid, e * d * d, polynomial(3.0 * cubic)]
}

/// The result.
pub fn gelu(x: &[f64]) -> Vec<Approx> {
    let y = |&x: &f64| Approx::exact(x) * gelu_parts(x)[0];
    x.iter().map(y).collect()
}

/// The gradient of x.
pub fn gelu_gradient(x: &[f64], grad: &[f64]) -> Vec<Approx> {
    let dx = |(&x, &grad): (&f64, &f64)| {
        let [sigmoid, slope, du] = gelu_parts(x);
        Approx::exact(grad) * (slope * (du * Approx::exact(x)) + sigmoid)
    };
    x.iter().zip(grad).map(dx).collect()
}

/// Rotary embedding of rows of `d` elements, row `r` at position `r % t`.
#[derive(Clone, Copy)]
pub struct Rope {
    /// Elements of a row.
    pub d: usize,
    /// Positions.
    pub t: usize,
    /// Pairs are neighbours, not halves of the row.
    pub interleaved: bool,
}

impl Rope {
    /// The elements of pair `j`.
    fn pair(self, j: usize) -> [usize; 2] {
        match self.interleaved {
            true => [2 * j, 2 * j + 1],
            false => [j, j + self.d / 2],
        }
    }

    /// Rotates forward (`sign` 1), or back for the gradient of x (-1).
    pub fn rotate(self, x: &[f64], cos: &[f64], sin: &[f64], sign: f64) -> Vec<Approx> {
        let half = self.d / 2;
        let mut y = vec![Approx::exact(0.0); x.len()];
        for (row, (x, y)) in x.chunks(self.d).zip(y.chunks_mut(self.d)).enumerate() {
            for j in 0..half {
                let [a, b] = self.pair(j);
                let at = row % self.t * half + j;
                let [x0, x1] = [x[a], x[b]].map(Approx::exact);
                let [cos, sin] = [cos[at], sign * sin[at]].map(Approx::exact);
                y[a] = x0 * cos - x1 * sin;
                y[b] = x0 * sin + x1 * cos;
            }
        }
        y
    }

    /// Gradients of cos and sin, in tables of `positions` rows.
    pub fn angles(self, x: &[f64], grad: &[f64], positions: usize) -> [Vec<Approx>; 2] {
        let (half, rows) = (self.d / 2, x.len() / self.d);
        let gradient = |term: &dyn Fn(usize, [usize; 2]) -> Approx| -> Vec<Approx> {
            let at = |position: usize, j| {
                let here = (0..rows).filter(|row| row % self.t == position);
                let [a, b] = self.pair(j);
                let terms = here.map(|row| term(row, [row * self.d + a, row * self.d + b]));
                sum_random(terms, rows / self.t)
            };
            let index = 0..positions * half;
            index.map(|i| at(i / half, i % half)).collect()
        };
        let product = |g: usize, x_at: usize| Approx::exact(grad[g]) * Approx::exact(x[x_at]);
        let cos = gradient(&|_, [a, b]| product(a, a) + product(b, b));
        let sin = gradient(&|_, [a, b]| product(b, a) - product(a, b));
        [cos, sin]
    }
}

/// The mean loss; `None` for ignored positions.
pub fn cross_entropy(logits: &[f64], targets: &[Option<usize>]) -> Approx {
    let classes = logits.len() / targets.len();
    let losses = logits
        .chunks(classes)
        .zip(targets)
        .filter_map(|(x, &target)| {
            let x: Vec<Approx> = exact(x).collect();
            let largest = x.iter().fold(f64::NEG_INFINITY, |a, x| a.max(x.value));
            let target = x[target?];
            let (_, total) = exponentials(x);
            Some(total.ln() + (Approx::exact(largest) - target))
        });
    // Added in f64.
    let counted = targets.iter().flatten().count() as f64;
    sum(losses, 1) / Approx::exact(counted)
}

/// The gradient of the logits, from that of the loss.
pub fn cross_entropy_gradient(logits: &[f64], targets: &[Option<usize>], grad: f64) -> Vec<Approx> {
    let classes = logits.len() / targets.len();
    let counted = Approx::exact(targets.iter().flatten().count() as f64);
    let factor = Approx::exact(grad) / counted;
    let mut dx = vec![];
    for (x, &target) in logits.chunks(classes).zip(targets) {
        let Some(target) = target else {
            dx.resize(dx.len() + classes, Approx::exact(0.0));
            continue;
        };
        let mut y = softmax(&exact(x).collect::<Vec<_>>(), 1.0);
        y[target] = y[target] - one();
        dx.extend(y.into_iter().map(|y| y * factor));
    }
    dx
}
