//! One linear layer in training.

use crate::upstream::gradient_from;
use anyhow::{Context, Result};
use candle_core::{DType, Module, Tensor, Var};
use fp8::nn::Linear;
use fp8::{Fp8Module, PrepareOptions, Recipe, RecipeName, fp8_autocast, prepare_fp8};
use std::cell::Cell;

/// A model of one layer.
#[derive(Fp8Module)]
pub struct Layer {
    pub l: Linear,
}

impl Layer {
    /// With FP8 state.
    pub fn prepared(weight: &Tensor, bias: &Tensor) -> Result<Self> {
        Self::prepared_with(weight, bias, &PrepareOptions::default())
    }

    /// Prepared with these options.
    pub fn prepared_with(weight: &Tensor, bias: &Tensor, options: &PrepareOptions) -> Result<Self> {
        let l = Linear::new(weight.clone(), Some(bias.clone())).with_path("l");
        let layer = Self { l };
        prepare_fp8(&layer, options)?;
        Ok(layer)
    }
}

/// Inputs of a step.
pub struct Inputs {
    /// `[tokens, in_features]`
    pub x: Tensor,
    /// `[out_features, in_features]`
    pub weight: Tensor,
    /// `[out_features]`
    pub bias: Tensor,
    /// `[tokens, out_features]`
    pub grad: Tensor,
}

/// The results of [`Step::run`].
pub const NAMES: [&str; 4] = ["y", "grad of x", "grad of weight", "grad of bias"];

/// A layer in training, with gradients for its input, weight and bias.
pub struct Step {
    layer: Box<dyn Module>,
    recipe: Option<Recipe>,
    x: Var,
    weight: Var,
    bias: Var,
    grad: Tensor,
    /// The values that the weight takes in turn.
    weights: [Tensor; 2],
    changes: Cell<usize>,
}

impl Step {
    pub fn new(inputs: &Inputs, dtype: DType, recipe: Option<RecipeName>) -> Result<Self> {
        Self::with_options(inputs, dtype, recipe, &PrepareOptions::default())
    }

    /// [`Step::new`] with a layer that was prepared with these options.
    pub fn with_options(
        inputs: &Inputs,
        dtype: DType,
        recipe: Option<RecipeName>,
        options: &PrepareOptions,
    ) -> Result<Self> {
        let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
        let (x, weight, bias) = (var(&inputs.x)?, var(&inputs.weight)?, var(&inputs.bias)?);
        let layer: Box<dyn Module> = match recipe {
            None => Box::new(candle_nn::Linear::new(
                weight.as_tensor().clone(),
                Some(bias.as_tensor().clone()),
            )),
            Some(_) => Box::new(Layer::prepared_with(&weight, &bias, options)?.l),
        };
        let changed = (&inputs.weight * 1.001)?.to_dtype(dtype)?;
        Ok(Self {
            layer,
            recipe: recipe.map(Recipe::from),
            x,
            weights: [inputs.weight.to_dtype(dtype)?, changed],
            changes: Cell::new(0),
            weight,
            bias,
            grad: inputs.grad.to_dtype(dtype)?,
        })
    }

    /// Changes the weight, as an optimizer would, so that the next step casts it again.
    pub fn change_weight(&self) -> Result<()> {
        let change = self.changes.get() + 1;
        self.changes.set(change);
        Ok(self.weight.set(&self.weights[change % 2])?)
    }

    /// y alone, computed as for a backward pass.
    pub fn forward(&self) -> Result<Tensor> {
        let guard = self.recipe.clone().map(fp8_autocast).transpose()?;
        let y = self.layer.forward(&self.x)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        Ok(y)
    }

    /// y and the gradients of x, weight and bias.
    pub fn run(&self) -> Result<[Tensor; 4]> {
        let y = self.forward()?;
        let loss = gradient_from(&y, &self.grad)?;
        let mut grads = match self.recipe {
            // As in a training loop: without candle's zeros and additions for parameters.
            Some(_) => fp8::backward(&loss)?,
            None => loss.backward()?,
        };
        let mut of = |var: &Var| grads.remove(var).context("a gradient is missing");
        let (x, weight, bias) = (of(&self.x)?, of(&self.weight)?, of(&self.bias)?);
        Ok([y, x, weight, bias])
    }
}
