//! What a path means in a module.

use crate::source::{Source, What};

/// One item or module of the crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    Module(usize),
    /// A module, and which of its items.
    Item(usize, usize),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    Here(Target),
    /// A path into another crate.
    Elsewhere(String),
}

/// Imports that refer to each other are followed so far.
const DEEPEST: usize = 16;

impl Source {
    /// What `path` means in `module`: several things where it names a type and a function, or under different `cfg`s.
    /// Nothing where a name is not found, as it is when a macro made it that is not followed.
    pub fn resolve(&self, module: usize, path: &[String]) -> Vec<Found> {
        self.resolve_within(module, path, DEEPEST)
    }

    fn resolve_within(&self, module: usize, path: &[String], deepest: usize) -> Vec<Found> {
        let Some(deepest) = deepest.checked_sub(1) else {
            return vec![];
        };
        let Some((first, mut rest)) = path.split_first() else {
            return vec![Found::Here(Target::Module(module))];
        };
        let mut found = match first.as_str() {
            "crate" => vec![Found::Here(Target::Module(0))],
            "self" => vec![Found::Here(Target::Module(module))],
            "super" => {
                let parent = self.modules[module].parent.unwrap_or(0);
                vec![Found::Here(Target::Module(parent))]
            }
            name => self.lookup(module, name, deepest),
        };
        if found.is_empty() {
            // The first name of a path that nothing here has is that of a crate.
            found = vec![Found::Elsewhere(first.clone())];
        }
        while let Some((name, after)) = rest.split_first() {
            rest = after;
            let step = |found: Found| match found {
                Found::Here(Target::Module(m)) if name == "super" => {
                    let parent = self.modules[m].parent.unwrap_or(0);
                    vec![Found::Here(Target::Module(parent))]
                }
                Found::Here(Target::Module(m)) => self.lookup(m, name, deepest),
                // A variant or an associated item: no item of its own.
                Found::Here(Target::Item(..)) => vec![],
                Found::Elsewhere(path) => vec![Found::Elsewhere(format!("{path}::{name}"))],
            };
            found = found.into_iter().flat_map(step).collect();
        }
        found
    }

    /// Everything that `name` means in `module`, private or not.
    fn lookup(&self, module: usize, name: &str, deepest: usize) -> Vec<Found> {
        let Some(deepest) = deepest.checked_sub(1) else {
            return vec![];
        };
        let here = &self.modules[module];
        let mut found = vec![];
        for (i, item) in here
            .items
            .iter()
            .enumerate()
            .filter(|(_, i)| i.name == name)
        {
            found.push(Found::Here(match item.what {
                What::Module(index) => Target::Module(index),
                What::Item(_) => Target::Item(module, i),
            }));
        }
        for import in &here.imports {
            // `use x::x` does not mean itself.
            if import.name.as_deref() == Some(name) && import.path != [name] {
                found.extend(self.resolve_within(module, &import.path, deepest));
            }
        }
        if found.is_empty() {
            for import in here.imports.iter().filter(|import| import.name.is_none()) {
                for glob in self.resolve_within(module, &import.path, deepest) {
                    if let Found::Here(Target::Module(m)) = glob
                        && m != module
                    {
                        found.extend(self.lookup(m, name, deepest));
                    }
                }
            }
        }
        found.dedup();
        found
    }
}
