//! What users of a crate can reach, and by which path.

use crate::paths::{Found, Target};
use crate::render;
use crate::source::{Source, What};
use std::collections::{BTreeSet, HashMap, VecDeque};
use syn::{ItemImpl, Path, PathArguments, Type};

/// What examples are counted of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Function,
    Method,
    Trait,
    Type,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Function, Self::Method, Self::Trait, Self::Type];

    pub fn name(self) -> &'static str {
        match self {
            Self::Function => "functions",
            Self::Method => "methods",
            Self::Trait => "traits",
            Self::Type => "types",
        }
    }
}

/// One line of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub path: String,
    pub line: String,
    /// `None` for what needs no example: fields, variants, impls, re-exports.
    pub kind: Option<Kind>,
    pub example: bool,
}

impl Entry {
    pub fn plain(path: impl Into<String>, line: String) -> Self {
        let path = path.into();
        Self {
            path,
            line,
            kind: None,
            example: false,
        }
    }
}

/// Everything public, sorted by path.
pub fn list(source: &Source) -> Vec<Entry> {
    let mut walk = Walk {
        source,
        names: HashMap::new(),
        modules: VecDeque::from([(0, source.name.clone(), String::new())]),
        entries: vec![],
    };
    walk.names.insert(Target::Module(0), source.name.clone());
    while let Some((module, path, cfg)) = walk.modules.pop_front() {
        walk.module(module, &path, &cfg);
    }
    walk.impls();
    let mut entries = walk.entries;
    entries.sort_by(|a, b| (&a.path, &a.line).cmp(&(&b.path, &b.line)));
    entries.dedup_by(|a, b| a.line == b.line);
    entries
}

struct Walk<'a> {
    source: &'a Source,
    /// The shortest public path of everything found so far.
    names: HashMap<Target, String>,
    modules: VecDeque<(usize, String, String)>,
    entries: Vec<Entry>,
}

impl Walk<'_> {
    fn module(&mut self, module: usize, path: &str, cfg: &str) {
        let here = &self.source.modules[module];
        let imported = here.imports.iter().filter_map(|i| i.name.as_deref());
        let own: BTreeSet<&str> = here
            .items
            .iter()
            .map(|i| i.name.as_str())
            .chain(imported)
            .collect();
        for (name, target, condition) in self.public_items(module) {
            self.place(
                target,
                &format!("{path}::{name}"),
                &format!("{cfg}{condition}"),
            );
        }
        for import in here.imports.iter().filter(|import| import.public) {
            let cfg = format!("{cfg}{}", import.cfg);
            let found = self.source.resolve(module, &import.path);
            let Some(name) = &import.name else {
                for found in found {
                    self.glob(found, path, &cfg, &own, &mut vec![module]);
                }
                continue;
            };
            let path = format!("{path}::{name}");
            if found.is_empty() {
                let from = import.path.join("::");
                let line = format!("{cfg}pub use {from} as {path} (made by a macro)");
                self.entries.push(Entry::plain(&path, line));
            }
            for found in found {
                match found {
                    Found::Here(target) => self.place(target, &path, &cfg),
                    Found::Elsewhere(from) => self.reexport(&from, &path, &cfg),
                }
            }
        }
    }

    fn public_items(&self, module: usize) -> Vec<(String, Target, String)> {
        let items = self.source.modules[module].items.iter().enumerate();
        items
            .filter(|(_, item)| item.public)
            .map(|(i, item)| {
                let target = match item.what {
                    What::Module(index) => Target::Module(index),
                    What::Item(_) => Target::Item(module, i),
                };
                (item.name.clone(), target, item.cfg.clone())
            })
            .collect()
    }

    /// `pub use found::*` in the module of `path`, which has the names `own` itself.
    fn glob(
        &mut self,
        found: Found,
        path: &str,
        cfg: &str,
        own: &BTreeSet<&str>,
        seen: &mut Vec<usize>,
    ) {
        let module = match found {
            Found::Here(Target::Module(module)) if !seen.contains(&module) => module,
            Found::Here(_) => return,
            Found::Elsewhere(from) => {
                return self.reexport(&format!("{from}::*"), &format!("{path}::*"), cfg);
            }
        };
        seen.push(module);
        for (name, target, condition) in self.public_items(module) {
            if !own.contains(name.as_str()) {
                self.place(
                    target,
                    &format!("{path}::{name}"),
                    &format!("{cfg}{condition}"),
                );
            }
        }
        let source = self.source;
        for import in source.modules[module]
            .imports
            .iter()
            .filter(|import| import.public)
        {
            let cfg = format!("{cfg}{}", import.cfg);
            for found in source.resolve(module, &import.path) {
                match (&import.name, found) {
                    (None, found) => self.glob(found, path, &cfg, own, seen),
                    (Some(name), _) if own.contains(name.as_str()) => {}
                    (Some(name), Found::Here(target)) => {
                        self.place(target, &format!("{path}::{name}"), &cfg)
                    }
                    (Some(name), Found::Elsewhere(from)) => {
                        self.reexport(&from, &format!("{path}::{name}"), &cfg)
                    }
                }
            }
        }
    }

    fn reexport(&mut self, from: &str, path: &str, cfg: &str) {
        self.entries
            .push(Entry::plain(path, format!("{cfg}pub use {from} as {path}")));
    }

    /// Gives a module or an item its path, or another one.
    fn place(&mut self, target: Target, path: &str, cfg: &str) {
        if let Some(first) = self.names.get(&target).cloned() {
            if first != path {
                self.reexport(&first, path, cfg);
            }
            return;
        }
        self.names.insert(target, path.to_string());
        match target {
            Target::Module(module) => {
                self.entries
                    .push(Entry::plain(path, format!("{cfg}pub mod {path}")));
                self.modules
                    .push_back((module, path.to_string(), cfg.to_string()));
            }
            Target::Item(module, i) => {
                let definition = &self.source.modules[module].items[i];
                if let What::Item(item) = &definition.what {
                    self.entries.extend(render::item(item, path, cfg));
                }
            }
        }
    }

    /// The path of a type or trait of this crate that users can reach.
    fn public_name(&self, module: usize, path: &Path) -> Option<String> {
        let segments: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        let found = self.source.resolve(module, &segments);
        found.into_iter().find_map(|found| match found {
            Found::Here(target @ Target::Item(..)) => self.names.get(&target).cloned(),
            _ => None,
        })
    }

    fn impls(&mut self) {
        for (module, here) in self.source.modules.iter().enumerate() {
            for (cfg, block) in &here.impls {
                let entries = self.impl_block(module, cfg, block);
                self.entries.extend(entries);
            }
        }
    }

    fn impl_block(&self, module: usize, cfg: &str, block: &ItemImpl) -> Vec<Entry> {
        let own = type_path(&block.self_ty).and_then(|path| self.public_name(module, path));
        let Some((of, _)) = &block.trait_ else {
            return own.map_or(vec![], |path| render::methods(block, &path, cfg));
        };
        let of_path = self.public_name(module, of);
        // Of a foreign type only what has to do with this crate: its traits, and conversions from its types.
        let of_own = || {
            arguments(of)
                .into_iter()
                .find_map(|path| self.public_name(module, path))
        };
        match own.clone().or(of_path).or_else(of_own) {
            Some(path) => vec![render::trait_impl(block, of, &path, own.as_deref(), cfg)],
            None => vec![],
        }
    }
}

/// The path of a type, through references.
fn type_path(ty: &Type) -> Option<&Path> {
    match ty {
        Type::Path(ty) => Some(&ty.path),
        Type::Reference(ty) => type_path(&ty.elem),
        _ => None,
    }
}

/// The types between the angle brackets of a path.
fn arguments(path: &Path) -> Vec<&Path> {
    let Some(PathArguments::AngleBracketed(arguments)) = path.segments.last().map(|s| &s.arguments)
    else {
        return vec![];
    };
    let types = arguments.args.iter().filter_map(|argument| match argument {
        syn::GenericArgument::Type(ty) => type_path(ty),
        _ => None,
    });
    types.collect()
}
