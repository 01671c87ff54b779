//! The linear layer in training with every cast, against candle-nn's in bf16.

use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session, check};
use crate::step::{Inputs, NAMES, Step};
use crate::upstream::gradient_from;
use anyhow::Result;
use candle_core::{DType, Var};
use fp8::RecipeName;
use fp8::fp8_candle::device::{cuda_info, take_gemm_paths};

/// (tokens, in_features, out_features).
const SHAPE: (usize, usize, usize) = (16384, 4096, 16384);

/// Recipes and the bars of whole steps.
const RECIPES: [(RecipeName, Option<f64>); 5] = [
    (RecipeName::Delayed, Some(1.65)),
    (RecipeName::Tensorwise, Some(1.55)),
    (RecipeName::Rowwise, Some(1.4)),
    (RecipeName::RowwiseWithGwHp, None),
    (RecipeName::Blockwise, Some(1.35)),
];

/// Whole steps, then forward passes of training alone.
pub fn run(session: &Session) -> Result<()> {
    let (m, k, n) = SHAPE;
    let hopper = cuda_info(&session.device)?.capability == (9, 0);
    for (part, backward) in [("forward+backward", true), ("forward", false)] {
        let recipes: Vec<_> = RECIPES
            .into_iter()
            .map(|(recipe, bar)| {
                (
                    format!("linear {part} {m} {k}->{n} {recipe}"),
                    recipe,
                    bar.filter(|_| backward),
                )
            })
            .filter(|(case, ..)| session.wants(case))
            // Only Hopper multiplies blocks.
            .filter(|(_, recipe, _)| hopper || *recipe != RecipeName::Blockwise)
            .collect();
        if !recipes.is_empty() {
            steps(session, backward, recipes)?;
        }
    }
    Ok(())
}

/// Two layers with separate inputs.
type Pair = [Step; 2];

fn steps(
    session: &Session,
    backward: bool,
    recipes: Vec<(String, RecipeName, Option<f64>)>,
) -> Result<()> {
    let (m, k, n) = (
        session.size(SHAPE.0),
        session.size(SHAPE.1),
        session.size(SHAPE.2),
    );
    let inputs = || -> Result<Inputs> {
        let normal = |shape: &[usize]| session.normal(shape, DType::BF16);
        Ok(Inputs {
            x: normal(&[m, k])?,
            weight: (normal(&[n, k])? * 0.02)?,
            bias: normal(&[n])?,
            grad: (normal(&[m, n])? * 0.01)?,
        })
    };
    let inputs = [inputs()?, inputs()?];
    let pair = |recipe| -> Result<Pair> {
        let [a, b] = &inputs;
        Ok([
            Step::new(a, DType::BF16, recipe)?,
            Step::new(b, DType::BF16, recipe)?,
        ])
    };
    let plain = pair(None)?;
    let ours = recipes
        .iter()
        .map(|(_, recipe, _)| pair(Some(*recipe)))
        .collect::<Result<Vec<_>>>()?;
    let expected = plain[0].run()?;
    for ((case, ..), steps) in recipes.iter().zip(&ours) {
        for step in steps {
            // The first steps of delayed scaling have no scales yet.
            for _ in 0..3 {
                step.run()?;
            }
        }
        take_gemm_paths();
        for (name, (ours, expected)) in NAMES.iter().zip(steps[0].run()?.iter().zip(&expected)) {
            check(&format!("{case}: {name}"), ours, expected, 0.1)?;
        }
        session.multiplied_fp8(case)?;
    }
    drop(expected);

    let run = |pair: &Pair, turn: usize| -> Result<()> {
        let step = &pair[turn % 2];
        if backward {
            step.run()?;
        } else {
            step.forward()?;
        }
        Ok(())
    };
    let output = Var::zeros((m, n), DType::BF16, &session.device)?;
    let upstream = |turn: usize| -> Result<()> {
        let grad = inputs[turn % 2].grad.clone();
        gradient_from(&output, &grad)?.backward()?;
        Ok(())
    };
    let mut contestants = vec![
        Contestant::new(upstream).queued(),
        Contestant::new(|turn| run(&plain, turn)),
    ];
    contestants.extend(
        ours.iter()
            .map(|pair| Contestant::new(move |turn| run(pair, turn))),
    );
    let times = session.race(contestants)?;
    let upstream_ms = if backward { times[0] } else { 0. };
    let plain_ms = times[1];
    let flop = if backward { 6. } else { 2. } * (m * n * k) as f64;
    let against = |ms: f64| (plain_ms - upstream_ms) / (ms - upstream_ms);
    for ((case, _, bar), &ms) in recipes.into_iter().zip(&times[2..]) {
        let measured = Measured {
            ours_ms: ms,
            against_ms: Some(plain_ms),
            flop: Some(flop),
            bytes: None,
        };
        session.report(case, (Metric::RatioBf16, Some(against(ms))), bar, measured);
    }
    if backward {
        let case = "linear: candle's handing over of the output's gradient";
        let measured = Measured {
            ours_ms: upstream_ms,
            ..Measured::default()
        };
        session.report(case, (Metric::Ms, Some(upstream_ms)), None, measured);
    }
    Ok(())
}
