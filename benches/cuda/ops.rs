//! Differentiable ops, forward and backward, and optimizer steps, against candle's.

use crate::layer::LayerConfig;
use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session, check};
use crate::upstream::gradient_from;
use anyhow::{Context, Result};
use candle_core::backprop::GradStore;
use candle_core::{D, DType, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fp8::fp8_candle::ops;
use fp8::optim::{AdamW, AdamWConfig};

type Op<'a> = &'a dyn Fn(&Tensor) -> candle_core::Result<Tensor>;

/// Every op, then the optimizer.
pub fn run(session: &Session) -> Result<()> {
    let bf16 = DType::BF16;
    unary(
        session,
        "gelu 8192x16384 bf16",
        ((8192, 16384), bf16),
        [&|x| Ok(ops::gelu(x)?), &Tensor::gelu],
    )?;
    let cols = session.size(4096);
    let weight = Var::ones(cols, bf16, &session.device)?;
    let bias = Var::zeros(cols, bf16, &session.device)?;
    let eps = 1e-5;
    unary(
        session,
        "layer_norm 8192x4096 bf16",
        ((8192, 4096), bf16),
        [
            &|x| Ok(ops::layer_norm(x, &weight, Some(&bias), eps)?),
            &|x| candle_nn::ops::layer_norm_slow(x, &weight, &bias, eps as f32),
        ],
    )?;
    unary(
        session,
        "rms_norm 8192x4096 bf16",
        ((8192, 4096), bf16),
        [&|x| Ok(ops::rms_norm(x, &weight, eps)?), &|x| {
            candle_nn::ops::rms_norm_slow(x, &weight, eps as f32)
        }],
    )?;
    unary(
        session,
        "softmax_last_dim 65536x2048 bf16",
        ((65536, 2048), bf16),
        [&|x| Ok(ops::softmax_last_dim(x)?), &|x| {
            candle_nn::ops::softmax(x, D::Minus1)
        }],
    )?;
    let (rows, classes) = (8192, 32768);
    let count = session.size(classes) as f32;
    let targets = Tensor::rand(0f32, count, session.size(rows), &session.device)?;
    let targets = targets
        .floor()?
        .clamp(0f32, count - 1.)?
        .to_dtype(DType::U32)?;
    unary(
        session,
        "cross_entropy 8192x32768 f32",
        ((rows, classes), DType::F32),
        [&|x| Ok(ops::cross_entropy(x, &targets)?), &|x| {
            candle_nn::loss::cross_entropy(x, &targets)
        }],
    )?;
    adamw(session)
}

/// `ours` against `candle`, each with the gradient of its input.
fn unary(
    session: &Session,
    name: &str,
    ((rows, cols), dtype): ((usize, usize), DType),
    [ours, candle]: [Op<'_>; 2],
) -> Result<()> {
    let case = format!("{name} forward+backward");
    if !session.wants(&case) {
        return Ok(());
    }
    let shape = (session.size(rows), session.size(cols));
    let input = || -> Result<Var> { Ok(Var::from_tensor(&session.normal(shape, dtype)?)?) };
    let xs: [Var; 2] = [input()?, input()?];
    let grad = session.normal(ours(&xs[0])?.shape(), dtype)?;
    let run = |op: Op<'_>, x: &Var| -> Result<Tensor> {
        let y = gradient_from(&op(x)?, &grad)?;
        y.backward()?.remove(x).context("no gradient")
    };
    check(&case, &run(ours, &xs[0])?, &run(candle, &xs[0])?, 0.05)?;
    let run = &run;
    let xs = &xs;
    let contestants =
        [ours, candle].map(|op| Contestant::new(move |turn| run(op, &xs[turn % 2])).queued());
    let times = session.race(contestants.into())?;
    let measured = Measured {
        ours_ms: times[0],
        against_ms: Some(times[1]),
        ..Measured::default()
    };
    session.report(case, (Metric::RatioCandle, None), None, measured);
    Ok(())
}

/// Parameters of the shapes of an encoder layer.
struct Parameters {
    vars: Vec<(String, Var)>,
    grads: GradStore,
}

impl Parameters {
    fn new(session: &Session, shapes: &[Vec<usize>]) -> Result<Self> {
        let (mut vars, mut ends) = (vec![], vec![]);
        for (i, shape) in shapes.iter().enumerate() {
            let normal = || session.normal(shape.as_slice(), DType::F32);
            let var = Var::from_tensor(&(normal()? * 0.02)?)?;
            ends.push(gradient_from(&var, &(normal()? * 1e-3)?)?);
            vars.push((format!("{i:02}"), var));
        }
        let grads = Tensor::stack(&ends, 0)?.sum_all()?.backward()?;
        Ok(Self { vars, grads })
    }
}

fn adamw(session: &Session) -> Result<()> {
    let plain = "adamw f32, parameters of the encoder layer";
    let clipped = "adamw f32 with clipping, parameters of the encoder layer";
    if !session.wants(plain) && !session.wants(clipped) {
        return Ok(());
    }
    let config = LayerConfig::default();
    let (hidden, ffn) = (session.size(config.hidden), session.size(config.ffn));
    let mut shapes = vec![vec![hidden, hidden]; 4];
    shapes.extend([vec![ffn, hidden], vec![hidden, ffn], vec![ffn]]);
    shapes.extend(vec![vec![hidden]; 9]);
    let values: usize = shapes
        .iter()
        .map(|shape| shape.iter().product::<usize>())
        .sum();

    let sets = [
        Parameters::new(session, &shapes)?,
        Parameters::new(session, &shapes)?,
        Parameters::new(session, &shapes)?,
    ];
    let optimizer = |set: &Parameters, max_grad_norm| {
        let config = AdamWConfig {
            max_grad_norm,
            ..AdamWConfig::default()
        };
        AdamW::from_named(set.vars.clone(), config)
    };
    let mut ours = optimizer(&sets[0], None)?;
    let mut clipping = optimizer(&sets[1], Some(1.))?;
    let vars = sets[2].vars.iter().map(|(_, var)| var.clone()).collect();
    let mut candle = candle_nn::AdamW::new(vars, ParamsAdamW::default())?;
    let [a, b, c] = &sets;
    let times = session.race(vec![
        Contestant::new(|_| Ok(ours.step(&a.grads)?)),
        Contestant::new(|_| Ok(clipping.step(&b.grads)?)),
        Contestant::new(|_| Ok(candle.step(&c.grads)?)),
    ])?;
    // Parameter, gradient and both moments are read, all but the gradient written; the norm reads gradients once more.
    for (case, ms, bytes) in [(plain, times[0], 32.), (clipped, times[1], 32.)] {
        let measured = Measured {
            ours_ms: ms,
            against_ms: Some(times[2]),
            flop: None,
            bytes: Some(bytes * values as f64),
        };
        session.report(case, (Metric::RatioCandle, None), None, measured);
    }
    Ok(())
}
