//! Which layers a run trains in FP8.

use anyhow::Result;
use fp8::{Outcome, PrepareOptions, PrepareReport, Recipe};

/// The run that trains with `delayed` in the layers where FP8 is faster on this machine.
pub const AUTO: &str = "auto";

/// All layers, or for [`AUTO`] those that are faster in FP8 with `tokens` rows. `slow` are the others, if it has chosen before: a
/// resumed run must not choose again.
pub fn options(
    name: &str,
    recipe: &Recipe,
    tokens: usize,
    slow: Option<&[String]>,
) -> Result<PrepareOptions> {
    if name != AUTO {
        return Ok(PrepareOptions::default());
    }
    let Some(slow) = slow else {
        return Ok(PrepareOptions::auto(recipe.clone(), tokens));
    };
    let mut options = PrepareOptions::default();
    for path in slow {
        options = options.with_off(path)?;
    }
    Ok(options)
}

/// The layers that stay in high precision.
pub fn slow(report: &PrepareReport) -> Vec<String> {
    let layers = report.layers.iter();
    let slow = layers.filter(|layer| matches!(layer.outcome, Outcome::Skipped(_)));
    slow.filter_map(|layer| layer.path.clone()).collect()
}
