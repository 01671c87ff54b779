//! Parameter groups: variables with their own hyperparameters, selected by patterns.

use serde::{Deserialize, Serialize};

use super::error::{OptimError, Result};
use super::settings::{check_lr, check_not_negative};
use fp8_files::names::{PathPattern, near};

/// The learning rate of a [`ParamGroup`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum GroupLr {
    Factor(f64),
    Value(f64),
}

/// Hyperparameters for the variables whose names a pattern matches: a name, or a glob ([`PathPattern`]). Where several groups match a
/// variable, the last one applies.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{AdamW, AdamWConfig, ParamGroup};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let var = || Var::ones(3, DType::F32, &Device::Cpu);
/// let vars = vec![("fc.weight".to_string(), var()?), ("fc.bias".to_string(), var()?)];
/// let groups = vec![
///     ParamGroup::new("fc.*")?.with_lr_factor(0.5),
///     ParamGroup::new("*.bias")?.with_lr(1e-4).with_weight_decay(0.),
/// ];
/// let optimizer = AdamW::from_named(vars, AdamWConfig::default())?.with_groups(groups)?;
/// assert_eq!(optimizer.groups()[1].pattern().as_str(), "*.bias");
///
/// let error = optimizer.with_groups(vec![ParamGroup::new("fc.wieght")?]).unwrap_err();
/// assert!(error.to_string().contains("did you mean fc.weight"), "{error}");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroup {
    #[serde(with = "written_pattern")]
    pattern: PathPattern,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lr: Option<GroupLr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight_decay: Option<f64>,
}

/// A pattern as text.
mod written_pattern {
    use super::PathPattern;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(
        pattern: &PathPattern,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(pattern.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathPattern, D::Error> {
        String::deserialize(from)?.parse().map_err(Error::custom)
    }
}

impl ParamGroup {
    /// The variables that `pattern` matches, still with the optimizer's hyperparameters.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn new(pattern: &str) -> Result<Self, OptimError> {
        Ok(Self {
            pattern: pattern.parse()?,
            lr: None,
            weight_decay: None,
        })
    }

    /// Sets the learning rate to the optimizer's times this factor.
    pub fn with_lr_factor(mut self, factor: f64) -> Self {
        self.lr = Some(GroupLr::Factor(factor));
        self
    }

    /// Sets a learning rate that schedules do not change.
    pub fn with_lr(mut self, lr: f64) -> Self {
        self.lr = Some(GroupLr::Value(lr));
        self
    }

    /// Sets the weight decay, regardless of the optimizer's [`DecayScope`](super::DecayScope); 0 for none.
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// The pattern.
    pub fn pattern(&self) -> &PathPattern {
        &self.pattern
    }

    /// The learning rate of the group where the optimizer's is `lr`.
    pub fn lr(&self, lr: f64) -> f64 {
        match self.lr {
            None => lr,
            Some(GroupLr::Factor(factor)) => lr * factor,
            Some(GroupLr::Value(own)) => own,
        }
    }

    /// The weight decay of the group; None for the optimizer's.
    pub fn weight_decay(&self) -> Option<f64> {
        self.weight_decay
    }

    fn validate(&self) -> Result<()> {
        match self.lr {
            None => {}
            Some(GroupLr::Value(lr)) => check_lr(lr)?,
            Some(GroupLr::Factor(factor)) => check_not_negative("lr_factor", factor)?,
        }
        match self.weight_decay {
            None => Ok(()),
            Some(decay) => check_not_negative("weight_decay", decay),
        }
    }
}

/// The groups of an optimizer, and which of them each variable is in.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    groups: Vec<ParamGroup>,
    /// By variable; empty without groups.
    members: Vec<Option<usize>>,
}

impl Groups {
    pub(super) fn new<'a>(
        groups: Vec<ParamGroup>,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<Self> {
        for group in &groups {
            group.validate()?;
            let pattern = &group.pattern;
            if !names.clone().any(|name| pattern.matches(name)) {
                return Err(OptimError::NoSuchVariable {
                    pattern: pattern.to_string(),
                    near: near(pattern.as_str(), names),
                });
            }
        }
        let member = |name: &str| groups.iter().rposition(|group| group.pattern.matches(name));
        let members = names.map(member).collect();
        Ok(Self { groups, members })
    }

    pub(super) fn all(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// The group of variable number `i`.
    pub(super) fn of(&self, i: usize) -> Option<&ParamGroup> {
        let group = *self.members.get(i)?;
        group.map(|group| &self.groups[group])
    }

    /// Learning rate and weight decay of variable number `i`; `lr` and `weight_decay` are the optimizer's.
    pub(super) fn rates(&self, i: usize, lr: f64, weight_decay: f64, decays: bool) -> (f64, f64) {
        let decay = if decays { weight_decay } else { 0. };
        match self.of(i) {
            None => (lr, decay),
            Some(group) => (group.lr(lr), group.weight_decay.unwrap_or(decay)),
        }
    }

    /// The saved groups, if they have the patterns of these.
    pub(super) fn resumed<'a>(
        &self,
        saved: Vec<ParamGroup>,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<Self> {
        let patterns = |groups: &[ParamGroup]| -> Vec<String> {
            groups.iter().map(|g| g.pattern.to_string()).collect()
        };
        let (expected, got) = (patterns(&self.groups), patterns(&saved));
        match expected == got {
            true => Self::new(saved, names),
            false => Err(OptimError::StateGroups { expected, got }),
        }
    }
}
