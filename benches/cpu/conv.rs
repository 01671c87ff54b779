//! Convolutions of ResNet-18 against candle's.

use crate::rows::Metric;
use crate::session::{Field, Session, Times};
use crate::timing::Contestant;
use anyhow::{Result, ensure};
use candle_core::{Device, Module, Tensor, Var};
use fp8::nn::{Conv2d, Conv2dConfig};
use fp8::{PrepareOptions, RecipeName, prepare_fp8, with_fp8};
use std::cell::Cell;
use std::hint::black_box;

const BATCH: usize = 4;

/// Channels in and out, kernel, stride, rows and columns of the images.
const SHAPES: [(usize, usize, usize, usize, usize); 11] = [
    (3, 64, 7, 2, 224),
    (64, 64, 3, 1, 56),
    (64, 128, 3, 2, 56),
    (64, 128, 1, 2, 56),
    (128, 128, 3, 1, 28),
    (128, 256, 3, 2, 28),
    (128, 256, 1, 2, 28),
    (256, 256, 3, 1, 14),
    (256, 512, 3, 2, 14),
    (256, 512, 1, 2, 14),
    (512, 512, 3, 1, 7),
];

/// Forward passes with a cached weight, and forward and backward passes after a change of the weight, with all casts of
/// `tensorwise`.
pub fn run(session: &Session) -> Result<()> {
    for (c_in, c_out, kernel, stride, size) in SHAPES {
        let shape = format!("{c_in}->{c_out} {kernel}x{kernel}/{stride} {size}");
        let forward = session.name(format!("conv2d forward {shape}"));
        let both = session.name(format!("conv2d forward+backward {shape}"));
        if !session.wants(&forward) && !session.wants(&both) {
            continue;
        }
        let device = &Device::Cpu;
        let x = Var::randn(0f32, 1., (BATCH, c_in, size, size), device)?;
        let weight = Var::randn(0f32, 0.05, (c_out, c_in, kernel, kernel), device)?;
        let config = Conv2dConfig {
            padding: kernel / 2,
            stride,
            ..Conv2dConfig::default()
        };
        let plain = candle_nn::Conv2d::new(weight.as_tensor().clone(), None, config);
        let ours = Conv2d::new(weight.as_tensor().clone(), None, config).with_path("conv");
        prepare_fp8(&ours, &PrepareOptions::default())?;
        let run_ours = |x: &Tensor| with_fp8(RecipeName::Tensorwise, || ours.forward(x));

        let images = x.as_detached_tensor();
        let (want, got) = (plain.forward(&images)?, run_ours(&images)?);
        let error = (&got - &want)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
        let share = (error / want.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt();
        ensure!(share < 0.06, "{forward}: {share} from candle's");

        if session.wants(&forward) {
            let times = session.time(Field {
                ours: Contestant::new(|| {
                    black_box(run_ours(&images)?);
                    Ok(())
                }),
                f32: Some(Contestant::new(|| {
                    black_box(plain.forward(&images)?);
                    Ok(())
                })),
                bf16: None,
                q8_0: None,
            })?;
            report(session, forward, times)?;
        }
        if session.wants(&both) {
            let step = |y: Tensor| -> Result<()> {
                y.sum_all()?.backward()?;
                Ok(())
            };
            let weights = [weight.copy()?, (weight.as_tensor() * 1.001)?];
            let changes = Cell::new(0);
            // As an optimizer would. Both contestants do this before a step, and it is not timed.
            let change = || -> Result<()> {
                changes.set(changes.get() + 1);
                Ok(weight.set(&weights[changes.get() % 2])?)
            };
            let times = session.time(Field {
                ours: Contestant::new(|| step(run_ours(&x)?)).with_setup(change),
                f32: Some(Contestant::new(|| step(plain.forward(&x)?)).with_setup(change)),
                bf16: None,
                q8_0: None,
            })?;
            report(session, both, times)?;
        }
    }
    Ok(())
}

fn report(session: &Session, case: String, times: Times) -> Result<()> {
    let ratio = times.f32.unwrap_or(f64::NAN) / times.ours.unwrap_or(f64::NAN);
    session.report(case, (Metric::RatioF32, ratio), Some(1.), times, None)
}
