//! The casts of a recipe in each prepared layer.

use super::{LayerReport, Note, Outcome, PrepareReport};
use crate::config::{CastConfig, ConfigError, Operand, Recipe, ResolvedConfig};
use crate::module::LayerKind;
use std::fmt;

/// The tensors of a layer that a recipe can cast, in the order of [`CastRow::casts`].
pub const CAST_TENSORS: [Operand; 6] = [
    Operand::Weight,
    Operand::Input,
    Operand::Output,
    Operand::GradOutput,
    Operand::GradInput,
    Operand::GradWeight,
];

/// The casts of one layer or operator.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CastRow {
    /// Path of the layer.
    pub path: String,
    /// What it computes.
    pub kind: LayerKind,
    /// The cast of each of [`CAST_TENSORS`]; None stays in high precision. An operand whose second GEMM uses another cast shows the
    /// first one. See [`CastRow::of_plain_products_only`] for casts that some calls leave out.
    pub casts: [Option<CastConfig>; 6],
}

impl CastRow {
    /// Whether the cast of this tensor is left out for inputs of more than two dimensions: the result of a batched
    /// [`nn::Matmul`](crate::nn::Matmul) and its gradient stay in high precision. Tables mark such casts with `*`.
    pub fn of_plain_products_only(&self, operand: Operand) -> bool {
        self.kind == LayerKind::Matmul && matches!(operand, Operand::Output | Operand::GradOutput)
    }
}

/// Every prepared layer and operator of a model with the casts of a recipe. Prints as a table.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use fp8_recipes::{PrepareOptions, RecipeName, nn, prepare_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let layer = nn::Linear::new(Tensor::zeros((16, 32), DType::F32, &Device::Cpu)?, None).with_path("fc");
/// # let report = prepare_fp8(&layer, &PrepareOptions::default())?;
/// let text = report.cast_table(RecipeName::Direct)?.to_string();
/// let lines: Vec<&str> = text.lines().collect();
/// assert!(lines[0].starts_with("layer  kind") && lines[1].starts_with("fc     linear"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct CastTable {
    /// The layers, in the order of the report.
    pub rows: Vec<CastRow>,
}

impl PrepareReport {
    /// The casts of `recipe` in the prepared layers and operators; a layer with a recipe of its own follows that.
    ///
    /// # Errors
    /// If the recipe is inconsistent.
    pub fn cast_table(&self, recipe: impl Into<Recipe>) -> Result<CastTable, ConfigError> {
        let guard = recipe.into().resolve()?;
        let mut rows = vec![];
        for layer in &self.layers {
            let (Some(path), Outcome::Converted(notes)) = (&layer.path, &layer.outcome) else {
                continue;
            };
            let own = notes.iter().find_map(|note| match note {
                Note::OwnRecipe(recipe) => Some(recipe.resolve()),
                _ => None,
            });
            let config = own.transpose()?;
            rows.push(CastRow {
                path: path.clone(),
                kind: layer.kind,
                casts: row_casts(layer, notes, config.as_ref().unwrap_or(&guard)),
            });
        }
        Ok(CastTable { rows })
    }
}

fn row_casts(
    layer: &LayerReport,
    notes: &[Note],
    config: &ResolvedConfig,
) -> [Option<CastConfig>; 6] {
    let fused = notes.contains(&Note::OutputFused);
    let multiplies = layer.kind.multiplies();
    CAST_TENSORS.map(|operand| {
        let there = match operand {
            Operand::Weight | Operand::GradWeight => {
                multiplies || layer.kind == LayerKind::Embedding
            }
            // The inputs of an embedding are integers.
            Operand::Input | Operand::GradInput => layer.kind != LayerKind::Embedding,
            _ => !fused,
        };
        let cast = *config.cast(operand);
        let taken = there && (multiplies || config.cast_operators);
        (taken && !cast.is_disabled()).then_some(cast)
    })
}

impl fmt::Display for CastTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["layer", "kind"].map(str::to_string).into_iter();
        let header = header.chain(CAST_TENSORS.map(|operand| operand.to_string()));
        let mut lines: Vec<Vec<String>> = vec![header.collect()];
        let mut marked = false;
        for row in &self.rows {
            let mut line = vec![row.path.clone(), row.kind.to_string()];
            for (operand, cast) in CAST_TENSORS.into_iter().zip(&row.casts) {
                let mark = if row.of_plain_products_only(operand) {
                    "*"
                } else {
                    ""
                };
                let short = cast.map(|cast| format!("{}{mark}", cast.short()));
                marked |= short.is_some() && !mark.is_empty();
                line.push(short.unwrap_or("-".into()));
            }
            lines.push(line);
        }
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max();
        let widths: Vec<usize> = (0..8).map(|i| width(i).unwrap_or(0)).collect();
        for (i, line) in lines.iter().enumerate() {
            let cells = line.iter().zip(&widths);
            let cells = cells.map(|(cell, &width)| format!("{cell:width$}"));
            let line = cells.collect::<Vec<_>>().join("  ");
            let end = if i + 1 < lines.len() { "\n" } else { "" };
            write!(f, "{}{end}", line.trim_end())?;
        }
        if marked {
            write!(
                f,
                "\n* of products of two matrices; batched ones keep their results in high precision"
            )?;
        }
        Ok(())
    }
}
