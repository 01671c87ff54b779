//! What an adapter is, apart from its matrices.

use super::targets::{Targets, captured, ends_with, whole};
use crate::error::{AdapterError, Error, Result};
use fp8_core::setters;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// An adapter: which layers it changes, and the rank, alpha and dropout of their updates. The fields are those of PEFT's `LoraConfig` that
/// this library reads and writes.
///
/// ```
/// use fp8_files::adapter::{AdapterConfig, Targets};
/// let config = AdapterConfig::new(8)
///     .with_alpha(16.)
///     .with_targets(Targets::names(["q_proj", "v_proj"]));
/// assert_eq!(config.rank_of("model.layers.0.self_attn.q_proj")?, 8);
/// # Ok::<(), fp8_files::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct AdapterConfig {
    /// Features between the two matrices of an update.
    pub rank: usize,
    /// Updates are multiplied by `alpha / rank`; by default alpha equals the rank.
    pub alpha: f64,
    /// The share of the inputs of updates that is dropped in training.
    pub dropout: f32,
    /// The layers; by default all linear layers but the head.
    pub targets: Targets,
    /// Layers among the targets that stay as they are.
    pub exclude: Option<Targets>,
    /// Whether updates are multiplied by `alpha / sqrt(rank)` instead.
    pub rslora: bool,
    /// Other ranks for some layers, by regular expressions for the ends of their paths. Those that match one layer give it one value.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas for some layers, as [`AdapterConfig::rank_pattern`].
    pub alpha_pattern: BTreeMap<String, f64>,
    /// For targets by name: the numbers of the transformer layers in which they apply; None for all.
    pub layers: Option<Vec<usize>>,
    /// The names before the numbers of transformer layers (`layers`); empty for any name.
    pub layers_pattern: Vec<String>,
    /// Name or directory of the base model.
    pub base_model: Option<String>,
    /// PEFT's name for what the model does, such as `CAUSAL_LM`.
    pub task: Option<String>,
    /// Ends of the paths of modules that the adapter replaces: their linear layers, such as a classifier, are trained and stored whole
    /// (`modules_to_save`) and get no update.
    pub saved: Vec<String>,
    /// The names of the classes of a saved classifier. PEFT has no place for them, so they are in the metadata of the tensors' file.
    pub labels: Vec<String>,
}

impl AdapterConfig {
    /// Updates of this rank for all linear layers but the head, multiplied by 1, without dropout.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            dropout: 0.,
            targets: Targets::AllLinear,
            exclude: None,
            rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            layers: None,
            layers_pattern: vec![],
            base_model: None,
            task: None,
            saved: vec![],
            labels: vec![],
        }
    }

    /// Whether the linear layer at `path` gets an update.
    ///
    /// # Errors
    /// As [`Targets::matches`].
    pub fn matches(&self, path: &str) -> Result<bool> {
        if let Some(exclude) = &self.exclude
            && exclude.matches(path)?
        {
            return Ok(false);
        }
        if self.is_saved(path) {
            return Ok(false);
        }
        Ok(self.targets.matches(path)? && self.is_in_layers(path)?)
    }

    /// Whether the adapter replaces the linear layer at `path`.
    pub fn is_saved(&self, path: &str) -> bool {
        // A saved module holds the layers below it.
        let modules = path.match_indices('.').map(|(dot, _)| &path[..dot]);
        modules
            .chain([path])
            .any(|module| self.saved.iter().any(|name| ends_with(module, name)))
    }

    /// Whether the path is in one of [`AdapterConfig::layers`], which are for targets by name only.
    fn is_in_layers(&self, path: &str) -> Result<bool> {
        let (Some(layers), Targets::Names(names)) = (&self.layers, &self.targets) else {
            return Ok(true);
        };
        if layers.is_empty() || names.iter().any(|name| name == path) {
            return Ok(true);
        }
        // As PEFT: the first number between two dots, with a name before it or after one of the patterns.
        let mut number = None;
        if self.layers_pattern.is_empty() {
            number = captured(r"^.*?\.[^.]*\.(\d+)\.", path)?;
        }
        for pattern in &self.layers_pattern {
            let expression = format!(r"^(?:|.*?\.)(?:{pattern})\.(\d+)\.");
            number = number.or(captured(&expression, path)?);
        }
        Ok(number.is_some_and(|number| layers.contains(&number)))
    }

    /// The rank of the update of the layer at `path`.
    ///
    /// # Errors
    /// As [`Targets::matches`], for [`AdapterConfig::rank_pattern`]; [`AdapterError::Ambiguous`] if two of its patterns give the layer different
    /// values.
    pub fn rank_of(&self, path: &str) -> Result<usize> {
        Ok(matching(&self.rank_pattern, path)?.unwrap_or(self.rank))
    }

    /// The alpha of the update of the layer at `path`.
    ///
    /// # Errors
    /// As [`Targets::matches`], for [`AdapterConfig::alpha_pattern`]; [`AdapterError::Ambiguous`] if two of its patterns give the layer different
    /// values.
    pub fn alpha_of(&self, path: &str) -> Result<f64> {
        Ok(matching(&self.alpha_pattern, path)?.unwrap_or(self.alpha))
    }

    /// What the update of the layer at `path` is multiplied by.
    ///
    /// # Errors
    /// As [`AdapterConfig::rank_of`] and [`AdapterConfig::alpha_of`].
    pub fn factor_of(&self, path: &str) -> Result<f64> {
        let (rank, alpha) = (self.rank_of(path)? as f64, self.alpha_of(path)?);
        Ok(match self.rslora {
            true => alpha / rank.sqrt(),
            false => alpha / rank,
        })
    }

    /// The ones among the linear layers `paths` that get an update in a new adapter, in order.
    ///
    /// # Errors
    /// [`AdapterError::NoTarget`] for a target that matches no layer, and as [`Targets::matches`].
    pub fn targeted<'a>(&self, paths: &[&'a str]) -> Result<Vec<&'a str>> {
        let mut found = vec![];
        for path in paths {
            if self.matches(path)? {
                found.push(*path);
            }
        }
        let matched = |name: &str| paths.iter().any(|path| ends_with(path, name));
        let unmatched = match &self.targets {
            Targets::Names(names) => names.iter().find(|name| !matched(name)).cloned(),
            Targets::Expression(_) | Targets::AllLinear => None,
        };
        let unmatched = unmatched.or_else(|| found.is_empty().then(|| self.targets.to_string()));
        match unmatched {
            None => Ok(found),
            Some(target) => Err(self.no_target(target, paths)),
        }
    }

    /// The error for a target that matches none of the linear layers `paths`.
    pub(super) fn no_target(&self, target: String, paths: &[&str]) -> Error {
        let ends = paths.iter().filter_map(|path| path.rsplit('.').next());
        let ends: BTreeSet<&str> = ends.collect();
        let layers = Vec::from_iter(ends).join(", ");
        AdapterError::NoTarget { target, layers }.into()
    }
}

/// The value of the patterns that match the end of `path` from a dot on.
fn matching<T: Copy + PartialEq + Display>(
    patterns: &BTreeMap<String, T>,
    path: &str,
) -> Result<Option<T>> {
    let mut found: Option<(&String, T)> = None;
    for (pattern, value) in patterns {
        if !whole(&format!(r"(?:.*\.)?(?:{pattern})"), path)? {
            continue;
        }
        match found {
            Some((first, other)) if other != *value => {
                return Err(AdapterError::Ambiguous {
                    path: path.to_string(),
                    first: first.clone(),
                    second: pattern.clone(),
                    values: format!("{other} and {value}"),
                }
                .into());
            }
            _ => found = Some((pattern, *value)),
        }
    }
    Ok(found.map(|(_, value)| value))
}

setters! { AdapterConfig:
    /// See [`AdapterConfig::alpha`].
    with_alpha(alpha: f64);
    /// See [`AdapterConfig::dropout`].
    with_dropout(dropout: f32);
    /// See [`AdapterConfig::targets`].
    with_targets(targets: Targets);
    /// See [`AdapterConfig::exclude`].
    with_exclude(exclude: Targets);
    /// See [`AdapterConfig::rslora`].
    with_rslora(rslora: bool);
    /// See [`AdapterConfig::rank_pattern`].
    with_rank_pattern(rank_pattern: BTreeMap<String, usize>);
    /// See [`AdapterConfig::alpha_pattern`].
    with_alpha_pattern(alpha_pattern: BTreeMap<String, f64>);
    /// See [`AdapterConfig::layers`].
    with_layers(layers: Vec<usize>);
    /// See [`AdapterConfig::saved`].
    with_saved(saved: Vec<String>);
    /// See [`AdapterConfig::labels`].
    with_labels(labels: Vec<String>);
    /// See [`AdapterConfig::base_model`].
    with_base_model(base_model: String);
}
