//! From a path as written to the module that defines what it names.

use crate::module::{Crate, Names};

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// A module itself.
    Module(usize, Names),
    /// A name that this module defines.
    Name(usize, Names, String),
}

/// Several crates, whose names stand for each other in paths.
#[derive(Clone, Copy)]
pub(crate) struct Crates<'a>(pub(crate) &'a [Crate]);

/// The lookups under way, of a name in a module of a crate: one that meets itself again ends there.
type Open = Vec<(usize, Names, String)>;

impl Crates<'_> {
    /// What `path` leads to, written in the module `at` of crate number `of`. Nothing if it leads out of the crates; more than one
    /// target if a module and a function share the name.
    pub(crate) fn resolve(self, of: usize, at: &Names, path: &[String]) -> Vec<Target> {
        self.path(of, at, path, &mut Vec::new())
    }

    /// The definition of a macro in the module `at` or one around it, which needs no import: `macro_rules!` above `mod`.
    pub(crate) fn macro_around(self, of: usize, at: &Names, name: &str) -> Option<Target> {
        let around = (0..=at.len()).rev().map(|len| at[..len].to_vec());
        let mut defining = around.filter(|at| self.0[of].modules[at].macros.contains(name));
        Some(Target::Name(of, defining.next()?, name.to_string()))
    }

    fn path(self, of: usize, at: &Names, path: &[String], open: &mut Open) -> Vec<Target> {
        let Some((first, rest)) = path.split_first() else {
            return Vec::new();
        };
        let start = match first.as_str() {
            "crate" => vec![Target::Module(of, Vec::new())],
            "self" => vec![Target::Module(of, at.clone())],
            "super" => outer(of, at),
            name => self.name(of, at, name, open),
        };
        self.rest(start, rest, open)
    }

    fn rest(self, start: Vec<Target>, rest: &[String], open: &mut Open) -> Vec<Target> {
        let Some((name, rest)) = rest.split_first() else {
            return start;
        };
        let mut inner = Vec::new();
        for target in &start {
            if let Target::Module(of, at) = target {
                inner.extend(match name.as_str() {
                    "super" => outer(*of, at),
                    name => self.name(*of, at, name, open),
                });
            }
        }
        let found = self.rest(inner, rest, open);
        if !found.is_empty() {
            return found;
        }
        // What follows a name is a part of it: a variant, a function of a type.
        let names = start.into_iter();
        names
            .filter(|target| matches!(target, Target::Name(..)))
            .collect()
    }

    /// A name in the scope of a module.
    fn name(self, of: usize, at: &Names, name: &str, open: &mut Open) -> Vec<Target> {
        let one = &self.0[of];
        let Some(module) = one.modules.get(at) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut inner = at.clone();
        inner.push(name.to_string());
        if one.modules.contains_key(&inner) {
            found.push(Target::Module(of, inner));
        }
        let lookup = (of, at.clone(), name.to_string());
        if open.contains(&lookup) {
            return found;
        }
        open.push(lookup);
        if module.defined.contains(name) {
            found.push(Target::Name(of, at.clone(), name.to_string()));
        } else if let Some(path) = module.imported.get(name) {
            match path.as_slice() {
                [one] if one == name => found.extend(self.extern_crate(name)),
                path => found.extend(self.path(of, at, path, open)),
            }
        }
        if found.is_empty() {
            for path in &module.globs {
                for target in self.path(of, at, path, open) {
                    if let Target::Module(of, at) = target {
                        found.extend(self.name(of, &at, name, open));
                    }
                }
            }
        }
        if found.is_empty() {
            found.extend(self.extern_crate(name));
        }
        open.pop();
        found
    }

    fn extern_crate(self, name: &str) -> Option<Target> {
        let of = self.0.iter().position(|one| one.name == name)?;
        Some(Target::Module(of, Vec::new()))
    }
}

/// The module around one.
fn outer(of: usize, at: &Names) -> Vec<Target> {
    let outer = at.split_last().map(|(_, outer)| outer.to_vec());
    outer.map(|at| Target::Module(of, at)).into_iter().collect()
}
