//! From a path as written to the module that defines what it names.

use crate::module::{Crate, Names};

/// How often one name may lead to another, so that imports in a circle end.
const DEPTH: usize = 32;

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

impl Crates<'_> {
    /// What `path` leads to, written in the module `at` of crate number `of`; None if it leads out of the crates.
    pub(crate) fn resolve(self, of: usize, at: &Names, path: &[String]) -> Option<Target> {
        self.path(of, at, path, DEPTH)
    }

    fn path(self, of: usize, at: &Names, path: &[String], depth: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let start = match first.as_str() {
            "crate" => Target::Module(of, Vec::new()),
            "self" => Target::Module(of, at.clone()),
            "super" => Target::Module(of, at[..at.len().checked_sub(1)?].to_vec()),
            name => self.name(of, at, name, depth)?,
        };
        self.rest(start, rest, depth)
    }

    fn rest(self, start: Target, rest: &[String], depth: usize) -> Option<Target> {
        match (start, rest.split_first()) {
            (Target::Module(of, at), Some((name, rest))) if name == "super" => {
                let outer = at[..at.len().checked_sub(1)?].to_vec();
                self.rest(Target::Module(of, outer), rest, depth)
            }
            (Target::Module(of, at), Some((name, rest))) => {
                self.rest(self.name(of, &at, name, depth)?, rest, depth)
            }
            // What follows a name is a part of it: a variant, a function of a type.
            (target, _) => Some(target),
        }
    }

    /// A name in the scope of a module.
    fn name(self, of: usize, at: &Names, name: &str, depth: usize) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        let found = &self.0[of];
        let module = found.modules.get(at)?;
        let mut inner = at.clone();
        inner.push(name.to_string());
        if found.modules.contains_key(&inner) {
            return Some(Target::Module(of, inner));
        }
        if module.defined.contains(name) {
            return Some(Target::Name(of, at.clone(), name.to_string()));
        }
        if let Some(path) = module.imported.get(name) {
            // `use fp8_core::fp8_core` would name itself.
            return match path.as_slice() {
                [one] if one == name => self.extern_crate(name),
                path => self.path(of, at, path, depth),
            };
        }
        let by_glob = module.globs.iter().find_map(|path| {
            let start = self.path(of, at, path, depth)?;
            self.rest(start, &[name.to_string()], depth)
                .filter(|target| match target {
                    Target::Module(..) => true,
                    Target::Name(of, at, name) => self.0[*of].modules[at].defined.contains(name),
                })
        });
        by_glob.or_else(|| self.extern_crate(name))
    }

    fn extern_crate(self, name: &str) -> Option<Target> {
        let of = self.0.iter().position(|one| one.name == name)?;
        Some(Target::Module(of, Vec::new()))
    }
}
