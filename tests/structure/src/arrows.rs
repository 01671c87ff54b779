//! Which file takes which names from which.

use crate::module::{Crate, Module, Names};
use crate::paths::Paths;
use crate::resolve::{Crates, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::Visit;

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

/// The names that go from one file to another, by the two files.
type Found<'a> = BTreeMap<(&'a Path, &'a Path), BTreeSet<String>>;

impl Crate {
    /// The arrows between files of `crates`, which may name each other: what the code of a file uses.
    pub fn arrows(crates: &[Self]) -> Vec<Arrow> {
        let mut found = Found::new();
        each_module(crates, |of, at, module, paths| {
            let resolved = paths.used.iter();
            let resolved = resolved.flat_map(|path| Crates(crates).resolve(of, at, path));
            let macros = paths.macros.iter();
            let macros = macros.filter_map(|name| Crates(crates).macro_around(of, at, name));
            for target in resolved.chain(macros) {
                // A module that a `use` line names is no import yet: its names are, where they are used.
                if let Target::Name(of, at, name) = target {
                    let to = crates[of].modules[&at].file.as_path();
                    found.entry((&module.file, to)).or_default().insert(name);
                }
            }
        });
        sorted(found)
    }

    /// The arrows of `pub use` lines: the files whose names a file hands on, whether its own code uses them or not.
    pub fn handed_on(crates: &[Self]) -> Vec<Arrow> {
        let mut found = Found::new();
        each_module(crates, |of, at, module, paths| {
            for path in &paths.handed_on {
                for target in Crates(crates).resolve(of, at, path) {
                    let (Target::Module(of, at) | Target::Name(of, at, _)) = target;
                    let to = crates[of].modules[&at].file.as_path();
                    let name = path.last().cloned().unwrap_or_default();
                    found.entry((&module.file, to)).or_default().insert(name);
                }
            }
        });
        sorted(found)
    }
}

fn each_module<'a>(
    crates: &'a [Crate],
    mut visit: impl FnMut(usize, &'a Names, &'a Module, Paths),
) {
    for (of, one) in crates.iter().enumerate() {
        for (at, module) in &one.modules {
            let mut paths = Paths::default();
            for item in &module.items {
                paths.visit_item(item);
            }
            visit(of, at, module, paths);
        }
    }
}

/// As arrows, without those from a file to itself.
fn sorted(found: Found<'_>) -> Vec<Arrow> {
    let between = found.into_iter().filter(|((from, to), _)| from != to);
    let arrow = |((from, to), names): ((&Path, &Path), BTreeSet<String>)| Arrow {
        from: from.to_path_buf(),
        to: to.to_path_buf(),
        names,
    };
    between.map(arrow).collect()
}
