//! Causal attention within a wide node, as transformer modules compute it: all products in FP8 against operands of bf16, in turn.

use crate::inputs::normal;
use crate::rows::Metric;
use crate::session::{Field, Session, Times};
use crate::timing::Contestant;
use anyhow::Result;
use candle_core::{DType, Tensor, Var};
use fp8::AttentionProducts;
use fp8::fp8_candle::WideNode;
use fp8::fp8_candle::wide::backward;
use fp8::nn::ops::AttentionOptions;

/// Batch, tokens, heads, features of a head.
const SIZES: [[usize; 4]; 3] = [[8, 256, 4, 64], [2, 1024, 8, 64], [1, 2048, 8, 128]];

/// Both passes, and the forward pass alone; with `--quick` not the largest size.
pub fn run(session: &Session) -> Result<()> {
    let sizes = match session.quick() {
        true => &SIZES[..2],
        false => &SIZES[..],
    };
    for &size in sizes {
        for trains in [false, true] {
            case(session, size, trains)?;
        }
    }
    Ok(())
}

fn case(session: &Session, size: [usize; 4], trains: bool) -> Result<()> {
    let [batch, tokens, heads, features] = size;
    let passes = if trains { "both passes" } else { "forward" };
    let case = session.name(format!(
        "attention fp8, {batch}x{tokens}, {heads} heads of {features}, {passes}"
    ));
    if !session.wants(&case) {
        return Ok(());
    }
    let value = |seed| normal(seed, size.as_slice());
    let qkv = [value(1)?, value(2)?, value(3)?];
    let weights = value(4)?;
    let vars = qkv.each_ref().map(Var::from_tensor);
    let [q, k, v] = vars;
    let vars = [q?, k?, v?];
    let bf16 = AttentionOptions::default()
        .with_causal(true)
        .with_operands(DType::BF16);
    let fp8 = bf16.clone().with_products(AttentionProducts::all());
    let step = |options: &AttentionOptions| -> Result<()> {
        let mut node = WideNode::new("attention");
        let args: Vec<&Tensor> = match trains {
            true => vars.iter().map(|var| var.as_tensor()).collect(),
            false => qkv.iter().collect(),
        };
        let [q, k, v] = [0, 1, 2].map(|i| node.argument(args[i]));
        let y = node.attention([&q, &k, &v], options)?;
        let y = node.finish(y)?;
        if trains {
            backward(&(y * &weights)?.sum_all()?)?;
        }
        Ok(())
    };
    let times = session.time(Field {
        ours: Contestant::new(|| step(&fp8)),
        f32: None,
        bf16: Some(Contestant::new(|| step(&bf16))),
        q8_0: None,
    })?;
    let ratio = times.bf16.unwrap_or(f64::NAN) / times.ours.unwrap_or(f64::NAN);
    // The other column is candle's.
    let times = Times {
        bf16: None,
        ..times
    };
    session.report(case, (Metric::RatioBf16, ratio), None, times, None)
}
