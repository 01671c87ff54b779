//! The linear layer under a guard: forward with a cached weight, and whole training steps with every cast.

use crate::inputs::{check, normal};
use crate::rows::Work;
use crate::session::{Field, Session, Times};
use crate::timing::{Contestant, race};
use anyhow::{Context, Result};
use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Shape, Tensor, Var};
use fp8::recipes::nn::Linear;
use fp8::recipes::{
    Autocast, PrepareOptions, Recipe, RecipeName, fp8_autocast, fp8_module, prepare_fp8,
};
use std::cell::Cell;
use std::hint::black_box;

/// (tokens, in_features, out_features).
const SHAPES: [(usize, usize, usize); 2] = [(512, 768, 3072), (2048, 1024, 4096)];

/// Recipes of the training steps and what is asked of each.
const RECIPES: [(RecipeName, f64); 4] = [
    (RecipeName::Tensorwise, 1.85),
    (RecipeName::Delayed, 1.85),
    (RecipeName::Rowwise, 1.7),
    (RecipeName::RowwiseWithGwHp, 1.3),
];

struct Layer {
    l: Linear,
}
fp8_module!(Layer { l });

impl Layer {
    fn prepared(weight: &Tensor, bias: &Tensor) -> Result<Self> {
        let l = Linear::new(weight.clone(), Some(bias.clone())).with_path("l");
        let mut layer = Self { l };
        prepare_fp8(&mut layer, &PrepareOptions::default())?;
        Ok(layer)
    }
}

/// Every shape, forward and in training.
pub fn run(session: &Session) -> Result<()> {
    for (m, k, n) in SHAPES {
        forward(session, (m, k, n))?;
        steps(session, (m, k, n))?;
    }
    Ok(())
}

fn forward(session: &Session, (m, k, n): (usize, usize, usize)) -> Result<()> {
    let case = session.name(format!("linear forward {m} {k}->{n} tensorwise"));
    if !session.wants(&case) {
        return Ok(());
    }
    let x = normal(1, (m, k))?;
    let (weight, bias) = ((normal(2, (n, k))? * 0.02)?, normal(3, n)?);
    let ours = Layer::prepared(&weight, &bias)?.l;
    let plain = candle_nn::Linear::new(weight.clone(), Some(bias.clone()));
    let narrow = |x: &Tensor| x.to_dtype(DType::BF16);
    let (x16, weight16, bias16) = (narrow(&x)?, narrow(&weight)?, narrow(&bias)?);
    let plain16 = candle_nn::Linear::new(weight16, Some(bias16));

    let guard = fp8_autocast(Autocast::new(RecipeName::Tensorwise).training(false))?;
    check(&case, &ours.forward(&x)?, &plain.forward(&x)?, 0.1)?;
    let times = session.time(Field {
        ours: calls(&ours, &x),
        f32: Some(calls(&plain, &x)),
        bf16: Some(calls(&plain16, &x16).optional()),
        q8_0: None,
    })?;
    guard.close()?;
    let work = Work::Flop(2. * (m * n * k) as f64);
    session.report_ratio(case, Some(1.85), times, work)
}

fn calls<'a>(layer: &'a impl Module, x: &'a Tensor) -> Contestant<'a> {
    Contestant::new(move || {
        black_box(layer.forward(x)?);
        Ok(())
    })
}

/// One recipe after the other against the same f32 and bf16 runs, all in turn.
fn steps(session: &Session, (m, k, n): (usize, usize, usize)) -> Result<()> {
    let named = RECIPES.map(|(recipe, bar)| {
        let case = format!("linear forward+backward {m} {k}->{n} {recipe}");
        (session.name(case), recipe, bar)
    });
    let cases: Vec<_> = named
        .into_iter()
        .filter(|(case, ..)| session.wants(case))
        .collect();
    if cases.is_empty() {
        return Ok(());
    }
    let inputs = Inputs {
        x: normal(1, (m, k))?,
        weight: (normal(2, (n, k))? * 0.02)?,
        bias: normal(3, n)?,
        grad: (normal(4, (m, n))? * 0.01)?,
    };
    let plain = Step::new(&inputs, DType::F32, None)?;
    // Takes seconds.
    let plain16 = (!session.quick())
        .then(|| Step::new(&inputs, DType::BF16, None))
        .transpose()?;
    let ours = cases
        .iter()
        .map(|&(_, recipe, _)| Step::new(&inputs, DType::F32, Some(recipe)))
        .collect::<Result<Vec<_>>>()?;
    let expected = plain.run()?;
    for ((case, recipe, _), ours) in cases.iter().zip(&ours) {
        // The first steps of delayed scaling have no scales yet.
        let early = if *recipe == RecipeName::Delayed { 2 } else { 0 };
        for _ in 0..early {
            ours.run()?;
            ours.change_weight()?;
        }
        for (name, (ours, expected)) in NAMES.iter().zip(ours.run()?.iter().zip(&expected)) {
            check(&format!("{case}: {name}"), ours, expected, 0.1)?;
        }
    }

    let mut contestants: Vec<_> = [&plain]
        .into_iter()
        .chain(&ours)
        .map(|step| step.race().warm())
        .collect();
    contestants.extend(plain16.iter().map(|step| step.race().optional()));
    let medians = race(&mut contestants, &session.pace())?;
    let work = Work::Flop(6. * (m * n * k) as f64);
    let [plain_ms, others_ms @ ..] = &medians[..] else {
        anyhow::bail!("a race without contestants");
    };
    let bf16_ms = others_ms.get(cases.len()).copied();
    for ((case, _, bar), ours) in cases.into_iter().zip(others_ms) {
        let times = Times {
            ours: Some(*ours),
            f32: Some(*plain_ms),
            bf16: bf16_ms,
            q8_0: None,
        };
        session.report_ratio(case, Some(bar), times, work)?;
    }
    Ok(())
}

struct Inputs {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    grad: Tensor,
}

const NAMES: [&str; 4] = ["y", "grad of x", "grad of weight", "grad of bias"];

/// A layer in training, with gradients for its input, weight and bias.
struct Step {
    layer: Box<dyn Module>,
    recipe: Option<Recipe>,
    x: Var,
    weight: Var,
    bias: Var,
    grad: Tensor,
    /// What the weight is set to before a step.
    weights: [Tensor; 2],
    changes: Cell<usize>,
}

impl Step {
    fn new(inputs: &Inputs, dtype: DType, recipe: Option<RecipeName>) -> Result<Self> {
        let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
        let (x, weight, bias) = (var(&inputs.x)?, var(&inputs.weight)?, var(&inputs.bias)?);
        let layer: Box<dyn Module> = match recipe {
            None => Box::new(candle_nn::Linear::new(
                weight.as_tensor().clone(),
                Some(bias.as_tensor().clone()),
            )),
            Some(_) => Box::new(Layer::prepared(&weight, &bias)?.l),
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

    /// As an optimizer would: the weight is cast anew in the next step.
    fn change_weight(&self) -> Result<()> {
        let change = self.changes.get() + 1;
        self.changes.set(change);
        Ok(self.weight.set(&self.weights[change % 2])?)
    }

    /// y and the gradients of x, weight and bias.
    fn run(&self) -> Result<[Tensor; 4]> {
        let guard = self.recipe.clone().map(fp8_autocast).transpose()?;
        let y = self.layer.forward(&self.x)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        let mut grads = y.apply_op1(GradientFrom(self.grad.clone()))?.backward()?;
        let mut of = |var: &Var| grads.remove(var).context("a gradient is missing");
        let (x, weight, bias) = (of(&self.x)?, of(&self.weight)?, of(&self.bias)?);
        Ok([y, x, weight, bias])
    }

    fn race(&self) -> Contestant<'_> {
        Contestant::new(|| {
            black_box(self.run()?);
            Ok(())
        })
        .with_setup(|| self.change_weight())
    }
}

/// Stands for the rest of a model: a scalar whose gradient at its input is the tensor given.
struct GradientFrom(Tensor);

impl CustomOp1 for GradientFrom {
    fn name(&self) -> &'static str {
        "gradient-from"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let shape = Shape::from(());
        let zero = CpuDevice.zeros_impl(&shape, self.0.dtype())?;
        Ok((zero, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
