//! One training step of one layer, and all that it computes.

use candle_core::{Module, Result, Tensor};
use fp8_recipes::nn::Linear;
use fp8_recipes::{Autocast, Fp8Module, end_step, fp8_autocast, prepare_fp8};

/// A model of one linear layer, `l`.
#[derive(Fp8Module)]
pub struct Model {
    /// The layer.
    pub l: Linear,
}

impl Model {
    /// The layer with FP8 state.
    pub fn prepared(weight: &Tensor, bias: Option<&Tensor>) -> Self {
        let l = Linear::new(weight.clone(), bias.cloned()).with_path("l");
        let model = Self { l };
        let report = prepare_fp8(&model, &Default::default()).unwrap();
        assert_eq!(report.converted(), 1, "{report}");
        model
    }

    /// How many tensors the layer has cast.
    pub fn casts(&self) -> u64 {
        self.l.fp8_state().unwrap().quantized_tensors()
    }

    /// Forward and backward pass under a guard, with `grad_output` as the gradient of the result; then the step ends.
    pub fn step(
        &self,
        x: &Tensor,
        grad_output: &Tensor,
        autocast: impl Into<Autocast>,
    ) -> Result<Step> {
        let guard = fp8_autocast(autocast)?;
        let y = self.l.forward(x)?;
        let step = self.backward(x, y, grad_output)?;
        guard.close()?;
        end_step()?;
        Ok(step)
    }

    /// The gradients that flow from `grad_output` at `y`.
    pub fn backward(&self, x: &Tensor, y: Tensor, grad_output: &Tensor) -> Result<Step> {
        let grads = (&y * grad_output)?.sum_all()?.backward()?;
        let of = |tensor: &Tensor| grads.get(tensor).cloned();
        Ok(Step {
            grad_x: of(x),
            grad_weight: of(&self.l.weight()?),
            grad_bias: self.l.bias().and_then(of),
            y,
        })
    }
}

/// What one training step of one layer computes.
pub struct Step {
    /// The result.
    pub y: Tensor,
    /// Gradient with respect to the input, if it has one.
    pub grad_x: Option<Tensor>,
    /// Gradient with respect to the weight, if it has one.
    pub grad_weight: Option<Tensor>,
    /// Gradient with respect to the bias, if it has one.
    pub grad_bias: Option<Tensor>,
}

impl Step {
    /// The result and those gradients that there are, with their names.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        [
            ("y", Some(&self.y)),
            ("grad_x", self.grad_x.as_ref()),
            ("grad_weight", self.grad_weight.as_ref()),
            ("grad_bias", self.grad_bias.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| Some((name, tensor?)))
        .collect()
    }

    /// [`Step::named`] of two steps, which must have the same gradients.
    #[track_caller]
    pub fn beside<'a>(&'a self, other: &'a Self) -> Vec<(&'static str, &'a Tensor, &'a Tensor)> {
        let (own, others) = (self.named(), other.named());
        let names = |all: &[(&'static str, &Tensor)]| all.iter().map(|x| x.0).collect::<Vec<_>>();
        assert_eq!(names(&own), names(&others), "gradients");
        let pairs = own.into_iter().zip(others);
        pairs.map(|((name, a), (_, b))| (name, a, b)).collect()
    }

    /// The gradient of the input, which must be there.
    pub fn grad_x(&self) -> &Tensor {
        self.grad_x.as_ref().expect("x has a gradient")
    }

    /// The gradient of the weight, which must be there.
    pub fn grad_weight(&self) -> &Tensor {
        self.grad_weight
            .as_ref()
            .expect("the weight has a gradient")
    }

    /// The gradient of the bias, which must be there.
    pub fn grad_bias(&self) -> &Tensor {
        self.grad_bias.as_ref().expect("the bias has a gradient")
    }
}
