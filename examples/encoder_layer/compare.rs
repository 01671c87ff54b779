//! How far the results of two steps are apart, and how far the dtypes of one let them be.

use crate::layer::{LayerStep, Pass, Precision};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use fp8::{CastConfig, CastRounding, Recipe};

/// Products of linear layers that a value goes through, one after the other: of queries, keys and values, of attention's projection, and
/// the two of the MLP.
const PRODUCTS: f64 = 4.;

/// Roundings of a value to the dtype of activations on its way through the layer: the input; the results of both norms; the results of
/// the four products, and their weights and biases; scores, probabilities and the result of attention; GELU; both residual sums.
const ROUNDINGS: f64 = 21.;

/// Shares of the norms of output and gradients: of the differences between two steps, or the largest expected ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    pub output: f64,
    /// Of the input and of all parameters, as one vector.
    pub gradients: f64,
}

impl Apart {
    /// The difference between `pass` and `reference`, by the norm of the reference's results.
    ///
    /// # Errors
    /// If a gradient is missing, or that of a parameter has another dtype than the parameter.
    pub fn between(reference: (&LayerStep, &Pass), other: (&LayerStep, &Pass)) -> Result<Self> {
        let (mut difference, mut norm) = squares(&reference.1.output, &other.1.output)?;
        let output = (difference / norm).sqrt();
        (difference, norm) = squares(
            reference.0.grad_input(&reference.1.grads)?,
            other.0.grad_input(&other.1.grads)?,
        )?;
        let vars = other.0.vars().data().lock().expect("no panic before");
        for (name, var) in vars.iter() {
            let missing = || format!("no gradient reached {name}");
            let grad = |pass: &'_ Pass| pass.grads.get(var).cloned().with_context(missing);
            let (expected, got) = (grad(reference.1)?, grad(other.1)?);
            ensure!(
                got.dtype() == var.dtype(),
                "the gradient of {name} is {:?}, the parameter {:?}",
                got.dtype(),
                var.dtype()
            );
            let (more, of) = squares(&expected, &got)?;
            (difference, norm) = (difference + more, norm + of);
        }
        Ok(Self {
            output,
            gradients: (difference / norm).sqrt(),
        })
    }

    /// The largest expected difference from f32. Each rounding moves a value by at most half a unit in the last place. Roundings are
    /// independent of each other, so their squares add up along the way through the layer, and in the backward pass on top of those of
    /// the forward pass.
    pub fn expected(precision: Precision) -> Result<Self> {
        let wide = ROUNDINGS * half_ulp(significant_bits(precision.activations)).powi(2);
        let (mut output, mut gradients) = (wide, 2. * wide);
        if let Some(recipe) = precision.recipe {
            let casts = Recipe::from(recipe).resolve()?;
            let sum =
                |of: &[&CastConfig]| PRODUCTS * of.iter().map(|cast| square(cast)).sum::<f64>();
            let forward = sum(&[&casts.input, &casts.weight, &casts.output]);
            let backward = sum(&[
                &casts.grad_output,
                &casts.weight_for_grad_input,
                &casts.grad_input,
                &casts.grad_output_for_grad_weight,
                &casts.input_for_grad_weight,
                &casts.grad_weight,
            ]);
            // What attention multiplies is bf16 beside a recipe.
            let attention = 4. * half_ulp(significant_bits(DType::BF16)).powi(2);
            output += forward + attention;
            gradients += forward + backward + 2. * attention;
        }
        Ok(Self {
            output: output.sqrt(),
            gradients: gradients.sqrt(),
        })
    }

    /// Whether this difference is one that `expected` allows. NaN is not.
    pub fn is_within(&self, expected: &Self) -> bool {
        self.output <= expected.output && self.gradients <= expected.gradients
    }
}

/// The sums of the squares of `other - reference` and of `reference`.
fn squares(reference: &Tensor, other: &Tensor) -> Result<(f64, f64)> {
    let sum =
        |x: &Tensor| Ok::<_, anyhow::Error>(f64::from(x.sqr()?.sum_all()?.to_scalar::<f32>()?));
    let wide = |x: &Tensor| x.detach().to_dtype(DType::F32);
    let (reference, other) = (wide(reference)?, wide(other)?);
    Ok((sum(&(other - &reference)?)?, sum(&reference)?))
}

/// The square of the largest error of a cast, as a share of the value.
fn square(cast: &CastConfig) -> f64 {
    let Some(format) = cast.format.filter(|_| !cast.is_disabled()) else {
        return 0.;
    };
    let nearest = half_ulp(format.mantissa_bits() + 1);
    match cast.rounding {
        CastRounding::NearestEven => nearest.powi(2),
        // To either neighbour, up to a whole unit away.
        _ => (2. * nearest).powi(2),
    }
}

/// Half a unit in the last place of numbers with so many significant bits, as a share of the smallest of them.
fn half_ulp(significant_bits: u32) -> f64 {
    0.5f64.powi(significant_bits as i32)
}

fn significant_bits(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 8,
        DType::F16 => 11,
        _ => 24,
    }
}
