//! Which file takes which names from which.

use crate::module::{Crate, Names, leaves};
use crate::resolve::{Crates, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// One file imports another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrow {
    /// The file that imports.
    pub from: PathBuf,
    /// The file that defines what is imported.
    pub to: PathBuf,
    /// The names.
    pub names: BTreeSet<String>,
}

impl Crate {
    /// The arrows between files of `crates`, which may name each other.
    pub fn arrows(crates: &[Self]) -> Vec<Arrow> {
        let mut found: BTreeMap<(&Path, &Path), BTreeSet<String>> = BTreeMap::new();
        for (of, one) in crates.iter().enumerate() {
            for (at, module) in &one.modules {
                let mut paths = Paths::default();
                for item in &module.items {
                    paths.visit_item(item);
                }
                for path in paths.0 {
                    // A module that a `use` line names is no import yet: its names are, where they are used.
                    let Some(Target::Name(of, at, name)) = Crates(crates).resolve(of, at, &path)
                    else {
                        continue;
                    };
                    let to = crates[of].modules[&at].file.as_path();
                    if to != module.file {
                        found.entry((&module.file, to)).or_default().insert(name);
                    }
                }
            }
        }
        let arrow = |((from, to), names): ((&Path, &Path), BTreeSet<String>)| Arrow {
            from: from.to_path_buf(),
            to: to.to_path_buf(),
            names,
        };
        found.into_iter().map(arrow).collect()
    }
}

/// All paths of a module, as written.
#[derive(Default)]
struct Paths(Vec<Names>);

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // A `pub use` hands names on: the file's own code does not depend on them, unless it uses them elsewhere.
        if !matches!(item.vis, syn::Visibility::Inherited) {
            return;
        }
        self.0
            .extend(leaves(&item.tree).into_iter().map(|(_, path)| path));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(
            path.segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect(),
        );
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}
}
