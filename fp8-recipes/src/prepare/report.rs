//! The report of `prepare_fp8`.

use crate::config::{Recipe, RecipeName, SkipReason};
use crate::module::LayerKind;
use crate::timings::LayerTiming;
use fp8_core::{Granularity, MX_BLOCK};
use std::fmt;

/// The result for one layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Outcome {
    /// It has FP8 state, with notes on what is special about it.
    Converted(Vec<Note>),
    /// It stays in high precision, for this reason.
    Skipped(SkipReason),
}

/// What is special about a converted layer. Prints as a few words.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Note {
    /// It follows a recipe of its own.
    OwnRecipe(Box<Recipe>),
    /// Other layers share its weight; these are their names for it.
    Tied(Vec<String>),
    /// The same layer occurs earlier in the model, and both share one state.
    SharedState,
    /// It already had state, which it keeps.
    PreparedBefore,
    /// Its output and the output's gradient stay in high precision.
    OutputFused,
    /// It is faster in FP8 on this machine: see [`crate::PrepareOptions::auto`].
    Faster(LayerTiming),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::OwnRecipe(recipe) => write!(f, "always {recipe}"),
            Note::Tied(names) => write!(f, "weight tied with {}", names.join(", ")),
            Note::SharedState => f.write_str("shares its state with the same layer used before"),
            Note::PreparedBefore => f.write_str("was prepared before"),
            Note::OutputFused => f.write_str("output fused"),
            Note::Faster(timing) => write!(f, "{:.2}x as fast: {timing}", timing.speedup()),
        }
    }
}

/// One layer or operator of the model.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerReport {
    /// Path in the checkpoint; None if it is not known.
    pub path: Option<String>,
    /// What it computes.
    pub kind: LayerKind,
    /// Rows of the weight; 0 for an operator without a GEMM.
    pub out_features: usize,
    /// Columns of the weight; 0 for an operator without a GEMM.
    pub in_features: usize,
    /// The result.
    pub outcome: Outcome,
}

impl LayerReport {
    /// Recipes under which the layer trains but cannot be exported, because `in_features` is not a multiple of their block. For a
    /// layer with a recipe of its own only that recipe is checked, otherwise every named one.
    pub fn without_export(&self) -> Vec<Recipe> {
        let (LayerKind::Linear, Outcome::Converted(notes)) = (self.kind, &self.outcome) else {
            return vec![];
        };
        let own = notes.iter().find_map(|note| match note {
            Note::OwnRecipe(recipe) => Some((**recipe).clone()),
            _ => None,
        });
        let recipes = match own {
            Some(own) => vec![own],
            None => RecipeName::ALL.map(Recipe::from).to_vec(),
        };
        let cuts = |recipe: &Recipe| {
            let block = recipe.resolve().ok().map(|config| config.input.granularity);
            match block {
                Some(Granularity::Blockwise { cols, .. }) => self.in_features.is_multiple_of(cols),
                Some(Granularity::Mx) => self.in_features.is_multiple_of(MX_BLOCK),
                _ => true,
            }
        };
        recipes.into_iter().filter(|recipe| !cuts(recipe)).collect()
    }
}

/// A pattern that matches no layer of the model: most likely a typo.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unmatched {
    /// The pattern of [`crate::PrepareOptions`], or the string of its filter.
    pub pattern: String,
    /// Paths of the model that it may have meant.
    pub near: Vec<String>,
}

impl fmt::Display for Unmatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` names no layer", self.pattern)?;
        match self.near.as_slice() {
            [] => Ok(()),
            near => write!(f, "; did you mean {}?", near.join(", ")),
        }
    }
}

/// Every linear layer and convolution of a model, in the order of its fields, and then its operators if the options prepare them, or if they
/// were prepared before or have a recipe that casts them. Prints as a table. Layers of candle_nn in the model
/// are listed without a path, because they have none. Layers within closures and skipped fields cannot be listed.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct PrepareReport {
    /// The layers.
    pub layers: Vec<LayerReport>,
    /// Patterns that match none of them.
    pub unmatched: Vec<Unmatched>,
    /// Paths that a pattern leaves in high precision although nothing is cast there, such as a batch norm.
    pub high_precision_anyway: Vec<String>,
    /// What went wrong with the file of [`PrepareOptions::timings`](crate::PrepareOptions).
    pub warnings: Vec<String>,
}

impl PrepareReport {
    /// Number of layers with FP8 state.
    pub fn converted(&self) -> usize {
        let converted = |layer: &&LayerReport| matches!(layer.outcome, Outcome::Converted(_));
        self.layers.iter().filter(converted).count()
    }

    /// Number of layers left in high precision.
    pub fn skipped(&self) -> usize {
        self.layers.len() - self.converted()
    }

    /// The entry of a path.
    pub fn get(&self, path: &str) -> Option<&LayerReport> {
        let mut layers = self.layers.iter();
        layers.find(|layer| layer.path.as_deref() == Some(path))
    }
}

impl fmt::Display for PrepareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |layer: &LayerReport| layer.path.clone().unwrap_or_else(|| "(no path)".into());
        let widths = self.layers.iter().map(|layer| name(layer).len());
        let width = widths.max().unwrap_or(0).max("layer".len());
        writeln!(f, "{:width$}  {:>13}  result", "layer", "[out, in]")?;
        let mut without_export = false;
        for layer in &self.layers {
            let shape = match layer.out_features {
                0 => layer.kind.to_string(),
                _ => format!("[{}, {}]", layer.out_features, layer.in_features),
            };
            write!(f, "{:width$}  {shape:>13}  ", name(layer))?;
            match &layer.outcome {
                Outcome::Converted(notes) => {
                    let mut notes: Vec<_> = notes.iter().map(Note::to_string).collect();
                    let recipes = layer.without_export();
                    if !recipes.is_empty() {
                        let names: Vec<_> = recipes.iter().map(Recipe::to_string).collect();
                        notes.push(format!("no export under {}", names.join(", ")));
                        without_export = true;
                    }
                    match notes.is_empty() {
                        true => writeln!(f, "fp8")?,
                        false => writeln!(f, "fp8 ({})", notes.join("; "))?,
                    }
                }
                Outcome::Skipped(reason) => writeln!(f, "high precision: {reason}")?,
            }
        }
        for path in &self.high_precision_anyway {
            writeln!(f, "note: `{path}` is in high precision anyway")?;
        }
        if without_export {
            writeln!(
                f,
                "no export: the layer trains under these recipes, but their block does not divide its in_features, so no file can hold its \
                 scales. Leave it out with PrepareOptions::with_off(path), quantize with --ignore path, or store it by rows \
                 with ExportOptions::with_ragged"
            )?;
        }
        for unmatched in &self.unmatched {
            writeln!(f, "warning: {unmatched}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let (converted, skipped) = (self.converted(), self.skipped());
        write!(f, "{converted} converted, {skipped} left in high precision")
    }
}
