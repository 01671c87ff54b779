//! Which layers a run trains in FP8.

use crate::gpt::{Gpt, GptConfig};
use anyhow::Result;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use fp8::{Outcome, PrepareOptions, PrepareReport, Recipe, prepare_fp8};

/// The run that trains with `delayed` in the layers where FP8 is faster on this machine.
pub const AUTO: &str = "auto";

/// Prepares all layers, and operators if the recipe casts them; for [`AUTO`] the layers that are faster in FP8 with `tokens` rows.
/// `slow` are the others, if it has chosen before: a resumed run must not choose again.
pub fn prepare(
    name: &str,
    recipe: &Recipe,
    model: &Gpt,
    tokens: usize,
    slow: Option<&[String]>,
) -> Result<PrepareReport> {
    let operators = recipe.resolve()?.cast_operators;
    let mut options = PrepareOptions::default().with_operators(operators);
    match (name, slow) {
        (AUTO, None) => options = PrepareOptions::auto(recipe.clone(), tokens),
        (AUTO, Some(slow)) => {
            for path in slow {
                options = options.with_off(path)?;
            }
        }
        _ => {}
    }
    Ok(prepare_fp8(model, &options)?)
}

/// The layers that [`AUTO`] leaves in high precision on this machine.
pub fn measured(
    recipe: &Recipe,
    config: &GptConfig,
    tokens: usize,
    device: &Device,
) -> Result<Vec<String>> {
    let vars = VarMap::new();
    let model = Gpt::new(config, VarBuilder::from_varmap(&vars, DType::F32, device))?;
    Ok(slow(&prepare(AUTO, recipe, &model, tokens, None)?))
}

/// The layers that stay in high precision.
pub fn slow(report: &PrepareReport) -> Vec<String> {
    let layers = report.layers.iter();
    let slow = layers.filter(|layer| matches!(layer.outcome, Outcome::Skipped(_)));
    slow.filter_map(|layer| layer.path.clone()).collect()
}
