//! The layer of `examples/encoder_layer`, forward and backward.

use crate::layer::{LayerConfig, LayerStep};
use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session};
use anyhow::Result;
use candle_core::DType;
use fp8::RecipeName;

/// f32, bf16, and bf16 with every recipe, in one race.
pub fn run(session: &Session) -> Result<()> {
    let high = [(DType::F32, None), (DType::BF16, None)];
    let fp8 = RecipeName::ALL.map(|recipe| (DType::BF16, Some(recipe)));
    let cases: Vec<_> = high
        .into_iter()
        .chain(fp8)
        .map(|(dtype, recipe)| {
            let fp8 = recipe.map_or(String::new(), |recipe| format!(" + {recipe}"));
            (
                format!("encoder layer {}{fp8}", dtype.as_str()),
                dtype,
                recipe,
            )
        })
        .collect();
    if !cases.iter().any(|(case, ..)| session.wants(case)) {
        return Ok(());
    }
    let full = LayerConfig::default();
    let config = LayerConfig {
        hidden: session.size(full.hidden),
        sequence: session.size(full.sequence),
        batch: full.batch,
        ffn: session.size(full.ffn),
        heads: session.size(full.heads),
        causal: false,
        attention: None,
    };
    // The ratios need bf16 whatever the filter says.
    let cases: Vec<_> = cases
        .into_iter()
        .filter(|(case, dtype, recipe)| {
            session.wants(case) || (*dtype, *recipe) == (DType::BF16, None)
        })
        .collect();
    let steps = cases
        .iter()
        .map(|&(_, dtype, recipe)| {
            let step = LayerStep::new(config, dtype, recipe, &session.device)?;
            step.check(&step.run()?)?;
            Ok(step)
        })
        .collect::<Result<Vec<_>>>()?;
    let contestants = steps.iter().map(|step| Contestant::new(|_| step.run()));
    let times = session.race(contestants.collect())?;
    let plain_ms = cases
        .iter()
        .zip(&times)
        .find(|((_, dtype, recipe), _)| (*dtype, *recipe) == (DType::BF16, None))
        .map(|(_, &ms)| ms);
    for ((case, _, recipe), &ms) in cases.into_iter().zip(&times) {
        let delayed = recipe == Some(RecipeName::Delayed);
        let measured = || Measured {
            ours_ms: ms,
            against_ms: recipe.and(plain_ms),
            flop: Some(config.flop()),
            bytes: None,
        };
        let bar = delayed.then_some(20.);
        session.report(&case, (Metric::Ms, Some(ms)), bar, measured());
        if recipe.is_some() {
            let bar = delayed.then_some(1.5);
            session.report(&case, (Metric::RatioBf16, None), bar, measured());
        }
    }
    Ok(())
}
