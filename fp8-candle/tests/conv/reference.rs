//! Convolutions by their definition, in f64, and the cases that they are compared in.

use candle_core::{DType, Tensor, Var};
use fp8_candle::conv::{ConvKind, ConvShape, fp8_conv};
use fp8_candle::{Fp8Tensor, GemmPlan, LinearPlan, Quantizer, Result};
use fp8_core::{Contraction, Format, Granularity};
use fp8_test_support::{flat64, normal, rounding};

/// Sizes of a convolution. Transposed, `n` are the channels of the input, and `image` is the input's.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub transposed: bool,
    pub batch: usize,
    /// Per group, on the side of the images that the kernel slides over.
    pub channels: usize,
    /// Per group, on the other side.
    pub n: usize,
    pub image: [usize; 2],
    pub kernel: [usize; 2],
    pub shape: ConvShape,
}

impl Case {
    pub fn new(batch: usize, channels: usize, n: usize, image: [usize; 2]) -> Self {
        Self {
            transposed: false,
            batch,
            channels,
            n,
            image,
            kernel: [3, 3],
            shape: ConvShape::new().with_padding([1, 1]),
        }
    }

    pub fn kernel(self, kernel: [usize; 2], padding: [usize; 2]) -> Self {
        Self {
            kernel,
            shape: self.shape.with_padding(padding),
            ..self
        }
    }

    pub fn stride(self, stride: [usize; 2]) -> Self {
        Self {
            shape: self.shape.with_stride(stride),
            ..self
        }
    }

    pub fn dilation(self, dilation: [usize; 2]) -> Self {
        Self {
            shape: self.shape.with_dilation(dilation),
            ..self
        }
    }

    pub fn groups(self, groups: usize) -> Self {
        Self {
            shape: self.shape.with_groups(groups),
            ..self
        }
    }

    pub fn transposed(self) -> Self {
        Self {
            transposed: true,
            ..self
        }
    }

    /// Height and width of the output; `None` if the sizes make none.
    pub fn output(&self) -> Option<[usize; 2]> {
        match self.transposed {
            false => self.shape.output_size(self.image, self.kernel).ok(),
            true => (self.shape.transposed_output_size(self.image, self.kernel)).ok(),
        }
    }

    pub fn x_dims(&self) -> [usize; 4] {
        let channels = if self.transposed {
            self.n
        } else {
            self.channels
        };
        let [h, w] = self.image;
        [self.batch, channels * self.shape.groups, h, w]
    }

    pub fn y_dims(&self) -> [usize; 4] {
        let channels = if self.transposed {
            self.channels
        } else {
            self.n
        };
        let [h, w] = self.output().expect("sizes that fit");
        [self.batch, channels * self.shape.groups, h, w]
    }

    pub fn weight_dims(&self) -> [usize; 4] {
        let n = self.n * self.shape.groups;
        [n, self.channels, self.kernel[0], self.kernel[1]]
    }

    /// Calls `f` with the indices of every product: in x, in the weight, in y.
    pub fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let (x, y) = (self.x_dims(), self.y_dims());
        // The kernel slides over `wide` from the places in `narrow`.
        let (wide, narrow) = if self.transposed { (y, x) } else { (x, y) };
        let ConvShape {
            stride,
            dilation,
            padding,
            groups,
            ..
        } = self.shape;
        let [kh, kw] = self.kernel;
        for (b, n) in pairs(self.batch, self.n * groups) {
            let group = n / self.n;
            for (oy, ox) in pairs(narrow[2], narrow[3]) {
                let at = ((b * narrow[1] + n) * narrow[2] + oy) * narrow[3] + ox;
                for (c, (ky, kx)) in
                    (0..self.channels).flat_map(|c| pairs(kh, kw).map(move |tap| (c, tap)))
                {
                    let iy = (oy * stride[0] + ky * dilation[0]).wrapping_sub(padding[0]);
                    let ix = (ox * stride[1] + kx * dilation[1]).wrapping_sub(padding[1]);
                    if iy >= wide[2] || ix >= wide[3] {
                        continue;
                    }
                    let channel = group * self.channels + c;
                    let from = ((b * wide[1] + channel) * wide[2] + iy) * wide[3] + ix;
                    let weight = ((n * self.channels + c) * kh + ky) * kw + kx;
                    match self.transposed {
                        false => f(from, weight, at),
                        true => f(at, weight, from),
                    }
                }
            }
        }
    }

    /// The layer.
    pub fn apply(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        plan: &LinearPlan,
    ) -> Result<Tensor> {
        match self.transposed {
            false => fp8_conv(ConvKind::Conv2d, x, weight, bias, &self.shape, plan),
            true => fp8_conv(
                ConvKind::ConvTranspose2d,
                x,
                weight,
                bias,
                &self.shape,
                plan,
            ),
        }
    }
}

fn pairs(a: usize, b: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..a).flat_map(move |a| (0..b).map(move |b| (a, b)))
}

/// Output and gradients.
pub struct Results {
    pub y: Tensor,
    pub grad_x: Tensor,
    pub grad_weight: Tensor,
    pub grad_bias: Option<Tensor>,
}

/// Standard normal x, weight and gradient of the output.
pub struct Data {
    pub x: Var,
    pub weight: Var,
    pub go: Tensor,
}

impl Data {
    pub fn new(case: &Case, seed: u64) -> Self {
        let var = |seed, dims: [usize; 4]| Var::from_tensor(&normal(seed, &dims)).unwrap();
        Self {
            x: var(3 * seed, case.x_dims()),
            weight: var(3 * seed + 1, case.weight_dims()),
            go: normal(3 * seed + 2, &case.y_dims()),
        }
    }

    pub fn run(&self, case: &Case, bias: Option<&Var>, plan: &LinearPlan) -> Result<Results> {
        let bias_tensor = bias.map(Var::as_tensor);
        let y = case.apply(&self.x, &self.weight, bias_tensor, plan)?;
        let go = self.go.to_dtype(y.dtype())?;
        let grads = (&y * &go)?.sum_all()?.backward()?;
        let grad = |x: &Var| grads.get(x).expect("a gradient").clone();
        Ok(Results {
            y: y.detach(),
            grad_x: grad(&self.x),
            grad_weight: grad(&self.weight),
            grad_bias: bias.map(grad),
        })
    }
}

/// One sum per element: its exact value, the sums of magnitudes and of squares, and how many terms it has.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    pub exact: Vec<f64>,
    magnitude: Vec<f64>,
    square: Vec<f64>,
    terms: Vec<usize>,
}

impl Sums {
    fn new(len: usize) -> Self {
        Self {
            exact: vec![0.; len],
            magnitude: vec![0.; len],
            square: vec![0.; len],
            terms: vec![0; len],
        }
    }

    fn add(&mut self, at: usize, product: f64) {
        self.exact[at] += product;
        self.magnitude[at] += product.abs();
        self.square[at] += product * product;
        self.terms[at] += 1;
    }

    /// Fails if an element is farther off than roundings of its sums explain. Every term is added at most once per rounding
    /// counted here: within a part of the batch or a tap, then over these.
    #[track_caller]
    pub fn check(&self, what: &str, got: &Tensor, inexact_products: bool) {
        let got = flat64(got);
        assert_eq!(got.len(), self.exact.len(), "{what}");
        for (at, got) in got.iter().enumerate() {
            let terms = self.terms[at] * if inexact_products { 2 } else { 1 };
            // Padding takes part in the sums with zeros, which are exact. The scale is rounded on its way to the operands.
            let bound = rounding::product_bound(terms + 4, self.magnitude[at], self.square[at]);
            let error = (got - self.exact[at]).abs();
            assert!(
                error <= bound,
                "{what}, {at}: {got:e}, expected {:e}: error {error:e}, bound {bound:e} of {terms} terms",
                self.exact[at]
            );
        }
    }
}

/// Output and gradients by definition: of x, weight and go for each of the three products.
pub fn reference(case: &Case, operands: [[&[f64]; 2]; 3]) -> [Sums; 3] {
    let [[x, w], [go_for_x, w_for_x], [go_for_w, x_for_w]] = operands;
    let len = |dims: [usize; 4]| dims.iter().product::<usize>();
    let mut y = Sums::new(len(case.y_dims()));
    let mut grad_x = Sums::new(len(case.x_dims()));
    let mut grad_weight = Sums::new(len(case.weight_dims()));
    case.each(|at_x, at_w, at_y| {
        y.add(at_y, x[at_x] * w[at_w]);
        grad_x.add(at_x, go_for_x[at_y] * w_for_x[at_w]);
        grad_weight.add(at_w, go_for_w[at_y] * x_for_w[at_x]);
    });
    [y, grad_x, grad_weight]
}

pub fn tensorwise(format: Format) -> Quantizer {
    Quantizer::dynamic(format, Granularity::Tensorwise)
}

/// All three products in FP8, x and weight in E4M3.
pub fn plan(grad_format: Format, granularity: Granularity) -> LinearPlan {
    let e4m3 = || Quantizer::dynamic(Format::E4M3, granularity);
    let go = || Quantizer::dynamic(grad_format, granularity);
    LinearPlan::new("conv")
        .with_output(GemmPlan::new(e4m3(), e4m3()))
        .with_grad_input(GemmPlan::new(go(), e4m3()))
        .with_grad_weight(GemmPlan::new(go(), e4m3()))
}

/// The values that a tensorwise cast leaves.
pub fn dequantized(x: &Tensor, format: Format) -> Vec<f64> {
    let x8 = Fp8Tensor::quantize(x, &tensorwise(format), Contraction::Cols).unwrap();
    flat64(&x8.dequantize(DType::F32).unwrap())
}

/// Signal to noise in dB.
pub fn sqnr(got: &Tensor, exact: &[f64]) -> f64 {
    assert_eq!(got.elem_count(), exact.len());
    let noise: f64 = flat64(got)
        .iter()
        .zip(exact)
        .map(|(got, exact)| (got - exact).powi(2))
        .sum();
    let signal: f64 = exact.iter().map(|x| x * x).sum();
    10. * (signal / noise).log10()
}
