//! Layers for which measured times choose between FP8 and high precision, against high precision alone: never slower. The choice is
//! made first, by a measurement of its own.

use crate::inputs::normal;
use crate::rows::Work;
use crate::session::{Field, Session};
use crate::step::{Inputs, Step};
use crate::timing::Contestant;
use anyhow::Result;
use candle_core::{DType, Device, Module, Tensor};
use fp8::fp8_core::Granularity;
use fp8::fp8_files::scheme::{InputScheme, LayerScheme};
use fp8::nn::{InputScaling, Linear, StaticWeight};
use fp8::timings::{Computation, LayerCase, LayerTimings};
use fp8::{PrepareOptions, RecipeName};
use std::hint::black_box;

/// Outputs and inputs, each with each.
const SIZES: [usize; 5] = [16, 64, 256, 1024, 2048];
const TOKENS: [usize; 4] = [1, 16, 128, 1024];
/// Equal up to the difference between two runs of the same.
const BAR: f64 = 0.99;

/// 100 training steps and 100 forward passes of served layers.
pub fn run(session: &Session) -> Result<()> {
    let timings = LayerTimings::new().without_file();
    for n in SIZES {
        for k in SIZES {
            for m in TOKENS {
                train(session, &timings, (m, k, n))?;
                serve(session, &timings, (m, k, n))?;
            }
        }
    }
    Ok(())
}

fn train(
    session: &Session,
    timings: &LayerTimings,
    (m, k, n): (usize, usize, usize),
) -> Result<()> {
    let case = session.name(format!("auto forward+backward {m} {k}->{n} delayed"));
    if !session.wants_large(&case) {
        return Ok(());
    }
    let inputs = Inputs {
        x: normal(1, (m, k))?,
        weight: (normal(2, (n, k))? * 0.02)?,
        bias: normal(3, n)?,
        grad: (normal(4, (m, n))? * 0.01)?,
    };
    let recipe = RecipeName::Delayed;
    let options = PrepareOptions::auto(recipe, m).with_timings(timings.clone());
    // A model without an FP8 layer needs no guard.
    let timed = LayerCase::new(Computation::training(recipe), (n, k), m);
    let fp8 = timings
        .get(&timed, &Device::Cpu)?
        .fp8_pays
        .then_some(recipe);
    let auto = Step::with_options(&inputs, DType::F32, fp8, &options)?;
    let plain = Step::new(&inputs, DType::F32, None)?;
    let times = session.time(Field {
        ours: contestant(&auto),
        f32: Some(contestant(&plain)),
        bf16: None,
        q8_0: None,
    })?;
    let work = Work::Flop(6. * (m * n * k) as f64);
    session.report_ratio(chosen(case, fp8.is_some()), bar(fp8.is_some()), times, work)
}

fn contestant(step: &Step) -> Contestant<'_> {
    Contestant::new(|| {
        black_box(step.run()?);
        Ok(())
    })
    .with_setup(|| step.change_weight())
}

/// A weight with a scale for each output, inputs with one for each token.
fn serve(
    session: &Session,
    timings: &LayerTimings,
    (m, k, n): (usize, usize, usize),
) -> Result<()> {
    let case = session.name(format!("auto served {m} {k}->{n} rowwise"));
    if !session.wants_large(&case) {
        return Ok(());
    }
    let scheme = LayerScheme {
        weight: Granularity::Rowwise,
        input: InputScheme::per_token(),
    };
    let (x, weight) = (normal(1, (m, k))?, (normal(2, (n, k))? * 0.02)?);
    let codes = scheme.quantize(&weight, None, false, "l")?;
    let decoded = Linear::new(codes.dequantize(DType::F32)?, None);
    let timed = LayerCase::new(Computation::Served(scheme), (n, k), m);
    let fp8 = timings.get(&timed, &Device::Cpu)?.fp8_pays;
    let auto = match fp8 {
        true => Linear::from_static(
            StaticWeight::new(&codes, InputScaling::per_token(), "l")?,
            None,
            "l",
        ),
        false => decoded.clone(),
    };
    let times = session.time(Field {
        ours: calls(&auto, &x),
        f32: Some(calls(&decoded, &x)),
        bf16: None,
        q8_0: None,
    })?;
    let work = Work::Flop(2. * (m * n * k) as f64);
    session.report_ratio(chosen(case, fp8), bar(fp8), times, work)
}

/// In high precision both contestants are the same, so the row shows how much times differ by chance, and has no bar.
fn bar(fp8: bool) -> Option<f64> {
    fp8.then_some(BAR)
}

/// The case with its choice.
fn chosen(case: String, fp8: bool) -> String {
    format!("{case}: {}", if fp8 { "fp8" } else { "f32" })
}

fn calls<'a>(layer: &'a Linear, x: &'a Tensor) -> Contestant<'a> {
    Contestant::new(move || {
        black_box(layer.forward(x)?);
        Ok(())
    })
}
