//! How an adapter names the layers of its base.

use crate::contents::is_head;

/// What classes of transformers with a head put before the paths of the model.
const BASES: [&str; 2] = ["model", "bert"];

/// From the paths of a base's files to those in an adapter.
///
/// An adapter has the paths of the class of transformers that it was trained on, and a file those of the class that wrote it: `BertModel`
/// leaves out the `bert.` that `BertForMaskedLM` writes.
///
/// ```
/// use fp8_files::adapter::Naming;
/// let naming = Naming::Without("bert");
/// assert_eq!(naming.of("bert.encoder.layer.0.output.dense"), "encoder.layer.0.output.dense");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Naming {
    /// The same paths.
    #[default]
    Same,
    /// Without this first component, if a path has it.
    Without(&'static str),
    /// With this first component, except for heads.
    With(&'static str),
}

impl Naming {
    /// The naming under which the adapter has one of the base's `paths`, as `has` says.
    pub(super) fn find(paths: &[&str], has: impl Fn(&str) -> bool) -> Self {
        let without = BASES.map(Self::Without);
        let others = without.into_iter().chain(BASES.map(Self::With));
        let mut all = [Self::Same].into_iter().chain(others);
        let fits = |naming: &Self| paths.iter().any(|path| has(&naming.of(path)));
        all.find(fits).unwrap_or_default()
    }

    /// The path in the base of a layer that only the adapter has.
    pub(crate) fn back<'a>(&self, own: &'a str) -> &'a str {
        match self {
            Self::With(base) => {
                let rest = own.strip_prefix(base);
                rest.and_then(|rest| rest.strip_prefix('.')).unwrap_or(own)
            }
            Self::Same | Self::Without(_) => own,
        }
    }

    /// The path of a layer in the adapter.
    pub fn of(&self, path: &str) -> String {
        match self {
            Self::Same => path.to_string(),
            Self::Without(base) => {
                let rest = path.strip_prefix(base);
                let rest = rest.and_then(|rest| rest.strip_prefix('.'));
                rest.unwrap_or(path).to_string()
            }
            // Heads stand beside the model that this is the name of.
            Self::With(_) if is_head(path) => path.to_string(),
            Self::With(base) => format!("{base}.{path}"),
        }
    }
}
