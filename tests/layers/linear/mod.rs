//! The FP8 linear layer under a guard: fidelity, shapes, dtypes, gradients, threads and bad input.

mod bad_values;
mod fidelity;
mod gradients;
mod rounded;
mod shapes;
mod threads;
mod weight_rounding;

use candle_core::{DType, Result, Tensor, Var};
use fp8::config::{Operand, ResolvedConfig};
use fp8::fp8_candle::Quantizer;
use fp8::fp8_core::Contraction::{self, Cols, Rows};
use fp8::{Autocast, Fp8LinearConfig, RecipeName};
use fp8_test_support::{Model, Step, assert_within, flat64, normal, rounding, ulp};

pub const DYNAMIC: [RecipeName; 3] = [
    RecipeName::Tensorwise,
    RecipeName::Rowwise,
    RecipeName::RowwiseWithGwHp,
];

pub const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

pub fn config(name: RecipeName) -> Fp8LinearConfig {
    Fp8LinearConfig::from_recipe_name(name)
}

/// The recipe with exact scales. With powers of two a scale along the wrong axis would hardly show.
pub fn exact_config(name: RecipeName) -> Fp8LinearConfig {
    config(name).with_round_scales_to_power_of_two(false)
}

/// x, weight and grad_output of standard normal values.
pub fn operands(m: usize, k: usize, n: usize) -> (Tensor, Tensor, Tensor) {
    (normal(1, (m, k)), normal(2, (n, k)), normal(3, (m, n)))
}

pub fn var(x: &Tensor, dtype: DType) -> Result<Var> {
    Var::from_tensor(&x.to_dtype(dtype)?)
}

/// One step of a layer `[M, K] -> [M, N]` under `autocast`; input, weight and bias are trainable.
pub fn trainable(m: usize, k: usize, n: usize, autocast: impl Into<Autocast>) -> Result<Step> {
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let bias = Var::from_tensor(&normal(4, n))?;
    Model::prepared(&weight, Some(&bias)).step(&x, &g, autocast)
}

/// The operand of a GEMM in f64, after its FP8 cast.
pub fn cast_as(
    config: &ResolvedConfig,
    operand: Operand,
    x: &Tensor,
    contraction: Contraction,
) -> Result<Tensor> {
    let cast = config.cast(operand);
    if cast.is_disabled() {
        return x.detach().to_dtype(DType::F64);
    }
    Ok(Quantizer::dynamic(cast.format.unwrap(), cast.granularity)
        .with_power_of_two(config.round_scales_to_power_of_two)
        .quantize(x, contraction)?
        .tensor
        .dequantize(DType::F64)?)
}

/// A product in f64 with what [`rounding::product_bound`] needs to know of each sum: its length, and the sums of |a||b| and of
/// (a b)^2.
pub struct Oracle {
    pub product: Tensor,
    pub len: usize,
    pub magnitude: Vec<f64>,
    pub square: Vec<f64>,
}

impl Oracle {
    pub fn new(a: &Tensor, b: &Tensor) -> Result<Self> {
        Ok(Self {
            product: a.matmul(b)?,
            len: a.dim(1)?,
            square: flat64(&a.sqr()?.matmul(&b.sqr()?)?),
            magnitude: flat64(&a.abs()?.matmul(&b.abs()?)?),
        })
    }

    /// The output, grad_input and grad_weight of a dynamic recipe.
    pub fn gemms(config: &ResolvedConfig, x: &Tensor, w: &Tensor, g: &Tensor) -> Result<[Self; 3]> {
        let cast = |operand, x, contraction| cast_as(config, operand, x, contraction);
        Ok([
            Self::new(
                &cast(Operand::Input, x, Cols)?,
                &cast(Operand::Weight, w, Cols)?.t()?,
            )?,
            Self::new(
                &cast(Operand::GradOutput, g, Cols)?,
                &cast(Operand::WeightForGradInput, w, Rows)?,
            )?,
            Self::new(
                &cast(Operand::GradOutputForGradWeight, g, Rows)?.t()?,
                &cast(Operand::InputForGradWeight, x, Rows)?,
            )?,
        ])
    }

    /// Fails where `ours` is off by more than sums in f32 and one rounding to its dtype explain.
    pub fn check(&self, what: &str, ours: &Tensor) {
        let dtype = ours.dtype();
        let ours = ours.to_dtype(DType::F64).unwrap();
        assert_within(what, &ours, &self.product, |at, value| {
            rounding::product_bound(self.len, self.magnitude[at], self.square[at])
                + ulp(dtype, value)
        });
    }
}

/// How far f32 sums over the rows of `g` may be off.
pub fn bias_bounds(g: &Tensor) -> Result<Vec<f64>> {
    let g = g.to_dtype(DType::F64)?.flatten_to(g.rank() - 2)?;
    let (magnitudes, squares) = (flat64(&g.abs()?.sum(0)?), flat64(&g.sqr()?.sum(0)?));
    let pairs = magnitudes.into_iter().zip(squares);
    let rows = g.dim(0)?;
    Ok(pairs.map(|(m, s)| rounding::bound(rows, m, s)).collect())
}

pub fn check_against_oracle(
    what: &str,
    config: &Fp8LinearConfig,
    operands: (&Tensor, &Tensor, &Tensor),
    step: &Step,
) -> Result<()> {
    let (x, w, g) = operands;
    let oracles = Oracle::gemms(&config.resolve().unwrap(), x, w, g)?;
    let ours = [
        ("y", &step.y),
        ("grad_x", step.grad_x()),
        ("grad_weight", step.grad_weight()),
    ];
    for (oracle, (name, ours)) in oracles.iter().zip(ours) {
        oracle.check(&format!("{what}: {name}"), ours);
    }
    Ok(())
}
