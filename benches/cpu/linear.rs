//! The linear layer under a guard: forward with a cached weight, and whole training steps with every cast.

use crate::gemm::bar;
use crate::inputs::{check, normal};
use crate::rows::Work;
use crate::session::{Field, Session, Times};
use crate::step::{Inputs, Layer, NAMES, Step};
use crate::timing::{Contestant, race};
use anyhow::Result;
use candle_core::{DType, Module, Tensor};
use fp8::{Autocast, RecipeName, fp8_autocast};
use std::hint::black_box;

/// (tokens, in_features, out_features).
const SHAPES: [(usize, usize, usize); 2] = [(512, 768, 3072), (2048, 1024, 4096)];

/// Recipes of the training steps and their bars.
const RECIPES: [(RecipeName, f64); 4] = [
    (RecipeName::Tensorwise, 1.85),
    (RecipeName::Delayed, 1.85),
    (RecipeName::Rowwise, 1.7),
    (RecipeName::RowwiseWithGwHp, 1.3),
];

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
    session.report_ratio(case, Some(bar(session, 1.85)), times, work)
}

fn calls<'a>(layer: &'a impl Module, x: &'a Tensor) -> Contestant<'a> {
    Contestant::new(move || {
        black_box(layer.forward(x)?);
        Ok(())
    })
}

/// All recipes against the same f32 and bf16 runs, taking turns.
fn steps(session: &Session, (m, k, n): (usize, usize, usize)) -> Result<()> {
    let named = RECIPES.map(|(recipe, most)| {
        let case = format!("linear forward+backward {m} {k}->{n} {recipe}");
        (session.name(case), recipe, bar(session, most))
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
    // bf16 takes seconds.
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
        .map(|step| contestant(step).warm())
        .collect();
    contestants.extend(plain16.iter().map(|step| contestant(step).optional()));
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
            ..Times::default()
        };
        session.report_ratio(case, Some(bar), times, work)?;
    }
    Ok(())
}

fn contestant(step: &Step) -> Contestant<'_> {
    Contestant::new(|| {
        black_box(step.run()?);
        Ok(())
    })
    .with_setup(|| step.change_weight())
}
