//! Names of a tensor's dimensions, and which axis of a mesh of devices splits each.

use crate::error::{DenseError, Result};
use serde::{Deserialize, Serialize};

/// The logical name of each dimension of a tensor; None for a dimension that is never split.
pub type AxisNames = Vec<Option<String>>;

/// A table of logical axes (`batch`, `embed`, `mlp`) and the mesh axes (`data`, `model`) that split them, as flax's and fp8layers'
/// rules. It is data only: a layer checks and keeps what it says, for whoever splits its tensors.
///
/// ```
/// use fp8_recipes::nn::AxisRules;
/// # fn main() -> fp8_recipes::Result<()> {
/// let rules = AxisRules::new(
///     ["data", "model"],
///     [("batch", Some("data")), ("embed", None), ("mlp", Some("model"))],
/// )?;
/// let names = [Some("embed".to_string()), Some("mlp".to_string())];
/// assert_eq!(rules.assign("fc.kernel", &names)?, [None, Some("model".to_string())]);
/// assert!(rules.assign("fc.kernel", &[Some("heads".to_string())]).is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Table", into = "Table")]
pub struct AxisRules {
    mesh_axes: Vec<String>,
    rules: Vec<(String, Option<String>)>,
}

/// The table as it is stored.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    mesh_axes: Vec<String>,
    rules: Vec<(String, Option<String>)>,
}

impl From<AxisRules> for Table {
    fn from(AxisRules { mesh_axes, rules }: AxisRules) -> Self {
        Self { mesh_axes, rules }
    }
}

impl TryFrom<Table> for AxisRules {
    type Error = crate::Error;

    fn try_from(Table { mesh_axes, rules }: Table) -> Result<Self> {
        Self::new(mesh_axes, rules)
    }
}

impl AxisRules {
    /// Rules for a mesh with these axes: a logical axis and the mesh axis that splits it, or None for an axis that every device
    /// holds whole.
    ///
    /// # Errors
    /// [`DenseError::Rule`] for a logical axis with two rules or an empty name, and for a mesh axis that the mesh does not have or has
    /// twice.
    pub fn new<M: Into<String>, L: Into<String>, A: Into<String>>(
        mesh_axes: impl IntoIterator<Item = M>,
        rules: impl IntoIterator<Item = (L, Option<A>)>,
    ) -> Result<Self> {
        let mesh_axes: Vec<String> = mesh_axes.into_iter().map(Into::into).collect();
        let refused = |name: &str, reason: String| {
            let name = name.to_string();
            Err(DenseError::Rule { name, reason }.into())
        };
        let mut table: Vec<(String, Option<String>)> = vec![];
        for (logical, mesh) in rules {
            let (logical, mesh) = (logical.into(), mesh.map(Into::into));
            if logical.is_empty() {
                return refused(&logical, "a logical axis needs a name".into());
            }
            if table.iter().any(|(other, _)| *other == logical) {
                return refused(&logical, "it has two rules".into());
            }
            if let Some(mesh) = &mesh {
                let count = mesh_axes.iter().filter(|axis| *axis == mesh).count();
                if count != 1 {
                    let axes = mesh_axes.join(", ");
                    let reason =
                        format!("the mesh has {count} axes `{mesh}`, expected one of: {axes}");
                    return refused(&logical, reason);
                }
            }
            table.push((logical, mesh));
        }
        Ok(Self {
            mesh_axes,
            rules: table,
        })
    }

    /// The axes of the mesh.
    pub fn mesh_axes(&self) -> &[String] {
        &self.mesh_axes
    }

    /// Each logical axis with its mesh axis.
    pub fn rules(&self) -> &[(String, Option<String>)] {
        &self.rules
    }

    /// The mesh axis that splits each dimension of `tensor`, whose dimensions have these names; None for one that is not split.
    ///
    /// # Errors
    /// [`DenseError::UnknownAxis`] for a name without a rule, [`DenseError::MeshAxisTwice`] if two dimensions have one mesh axis.
    pub fn assign(&self, tensor: &str, names: &[Option<String>]) -> Result<AxisNames> {
        let mut assigned: AxisNames = vec![];
        for name in names {
            let mesh = match name {
                None => None,
                Some(name) => self.mesh_axis(tensor, name)?,
            };
            let before = assigned
                .iter()
                .position(|other| mesh.is_some() && *other == mesh);
            if let (Some(mesh), Some(before)) = (&mesh, before) {
                let text = |name: &Option<String>| name.clone().unwrap_or_default();
                return Err(DenseError::MeshAxisTwice {
                    tensor: tensor.to_string(),
                    mesh: mesh.clone(),
                    first: text(&names[before]),
                    second: text(name),
                }
                .into());
            }
            assigned.push(mesh);
        }
        Ok(assigned)
    }

    fn mesh_axis(&self, tensor: &str, name: &str) -> Result<Option<String>> {
        match self.rules.iter().find(|(logical, _)| logical == name) {
            Some((_, mesh)) => Ok(mesh.clone()),
            None => {
                let known: Vec<&str> = self.rules.iter().map(|(name, _)| name.as_str()).collect();
                Err(DenseError::UnknownAxis {
                    tensor: tensor.to_string(),
                    name: name.to_string(),
                    known: known.join(", "),
                }
                .into())
            }
        }
    }
}

/// Checks that a tensor of `rank` dimensions has no names, or one for each.
pub(super) fn check_count(tensor: &str, names: &[Option<String>], rank: usize) -> Result<()> {
    if names.is_empty() || names.len() == rank {
        return Ok(());
    }
    let text = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".into());
    Err(DenseError::AxisCount {
        tensor: tensor.to_string(),
        names: names.iter().map(text).collect(),
        rank,
    }
    .into())
}
