//! Attention in bf16, forward and backward, as a share of the chip's peak. What candle takes to hand gradients over is left out.

use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session};
use crate::upstream::gradient_from;
use anyhow::Result;
use candle_core::{DType, Tensor, Var};
use fp8::fp8_candle::device::cuda_info;
use fp8::fp8_candle::ops::{AttentionOptions, attention};

/// (batch, heads, tokens, features of a head).
type Shape = (usize, usize, usize, usize);

/// Shapes, whether causal, and the bars of the forward and the backward pass.
const CASES: [(Shape, bool, [Option<f64>; 2]); 4] = [
    ((4, 32, 2048, 128), false, [Some(0.45), Some(0.35)]),
    ((4, 32, 2048, 128), true, [None; 2]),
    ((4, 32, 2048, 64), false, [None; 2]),
    ((4, 32, 2048, 64), true, [None; 2]),
];

/// Operations of a multiprocessor of Hopper in a clock, dense bf16, and the clock in GHz that the data sheet's peak belongs to.
const HOPPER: (f64, f64) = (4096., 1.83);

/// Every shape.
pub fn run(session: &Session) -> Result<()> {
    let info = cuda_info(&session.device)?;
    let peak = (info.capability == (9, 0))
        .then_some(info.multiprocessors as f64 * HOPPER.0 * HOPPER.1 * 1e-3);
    for ((batch, heads, tokens, features), causal, bars) in CASES {
        let name = if causal {
            "causal attention"
        } else {
            "attention"
        };
        let cases = ["forward", "backward"]
            .map(|part| format!("{name} {batch}x{heads}x{tokens}x{features} bf16 {part}"));
        if !cases.iter().any(|case| session.wants(case)) {
            continue;
        }
        let shape = (batch, heads, session.size(tokens), features);
        let var = || -> Result<Var> { Ok(Var::from_tensor(&session.normal(shape, DType::BF16)?)?) };
        let [q, k, v] = [var()?, var()?, var()?];
        let options = || AttentionOptions::default().with_causal(causal);
        let forward = || attention(q.as_tensor(), k.as_tensor(), v.as_tensor(), options());
        let grad = session.normal(shape, DType::BF16)?;
        let end = gradient_from(&forward()?, &grad)?;
        // What candle takes to hand over the gradients of the result and of q, k and v.
        let output = var()?;
        let ends = [&output, &q, &k, &v].map(|var| gradient_from(var, &grad));
        let ends = ends.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        let upstream = Tensor::stack(&ends, 0)?.sum_all()?;
        let times = session.race(vec![
            Contestant::new(|_| Ok(forward()?)).queued(),
            Contestant::new(|_| Ok(end.backward()?)).queued(),
            Contestant::new(|_| Ok(upstream.backward()?)).queued(),
        ])?;
        let times = [times[0], times[1] - times[2]];
        // Two products of `tokens` by `tokens` by `features` forward, five backward; half of them are masked if causal.
        let product = 2. * (batch * heads * features) as f64 * (shape.2 as f64).powi(2);
        let product = if causal { product / 2. } else { product };
        for (((case, ms), products), bar) in cases.into_iter().zip(times).zip([2., 5.]).zip(bars) {
            let flop = products * product;
            let measured = Measured {
                ours_ms: ms,
                flop: Some(flop),
                ..Measured::default()
            };
            let (value, bar) = match peak {
                Some(peak) => ((Metric::PeakShare, Some(flop / ms * 1e-9 / peak)), bar),
                None => ((Metric::Ms, Some(ms)), None),
            };
            session.report(case, value, bar, measured);
        }
    }
    Ok(())
}
