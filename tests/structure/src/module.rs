//! The modules of a crate: which file each is in, what it defines and what it imports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, UseTree};

/// A path of names, as written: `crate::data::Codes`.
pub(crate) type Names = Vec<String>;

/// A module, inline ones included.
#[derive(Default)]
pub(crate) struct Module {
    /// From the crate's folder.
    pub(crate) file: PathBuf,
    /// Names that the module defines itself, modules excepted.
    pub(crate) defined: BTreeSet<String>,
    /// Names that `use` lines bring in, and the path of each.
    pub(crate) imported: BTreeMap<String, Names>,
    /// Paths of `use path::*`.
    pub(crate) globs: Vec<Names>,
    /// Everything in the module but its modules.
    pub(crate) items: Vec<Item>,
}

/// The modules of one crate by their paths; the root has the empty path.
pub struct Crate {
    /// The name in `use` lines: `fp8_core`.
    pub name: String,
    pub(crate) modules: BTreeMap<Names, Module>,
}

impl Crate {
    /// Reads the crate `name` from the root file `root` on.
    ///
    /// # Errors
    /// If a file cannot be read or parsed: its path and the reason.
    pub fn read(name: &str, root: &Path) -> Result<Self, String> {
        let mut read = Self {
            name: name.to_string(),
            modules: BTreeMap::new(),
        };
        let folder = root.parent().unwrap_or(Path::new("")).to_path_buf();
        read.file(Vec::new(), root, &folder)?;
        Ok(read)
    }

    /// The files of the crate.
    pub fn files(&self) -> BTreeSet<&Path> {
        self.modules
            .values()
            .map(|module| module.file.as_path())
            .collect()
    }

    /// Reads one file; the files of its modules are in `folder`.
    fn file(&mut self, path: Names, file: &Path, folder: &Path) -> Result<(), String> {
        let failed = |reason: String| format!("{}: {reason}", file.display());
        let text = fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
        let parsed = syn::parse_file(&text).map_err(|error| failed(error.to_string()))?;
        self.items(path, parsed.items, file, folder)
    }

    fn items(
        &mut self,
        path: Names,
        items: Vec<Item>,
        file: &Path,
        folder: &Path,
    ) -> Result<(), String> {
        let mut module = Module {
            file: file.to_path_buf(),
            ..Module::default()
        };
        for item in items {
            match item {
                Item::Mod(inner) if !is_test(&inner.attrs) => {
                    let name = inner.ident.to_string();
                    let mut path = path.clone();
                    path.push(name.clone());
                    match inner.content {
                        Some((_, items)) => self.items(path, items, file, &folder.join(&name))?,
                        None => {
                            let (file, folder) = located(&inner.attrs, folder, &name);
                            self.file(path, &file, &folder)?;
                        }
                    }
                }
                Item::Mod(_) => {}
                item if attributes(&item).is_some_and(is_test) => {}
                item => module.take(item),
            }
        }
        self.modules.insert(path, module);
        Ok(())
    }
}

impl Module {
    fn take(&mut self, item: Item) {
        let name = match &item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        self.defined.extend(name.map(ToString::to_string));
        if let Item::Use(item) = &item {
            for (name, path) in leaves(&item.tree) {
                match name {
                    Some(name) => drop(self.imported.insert(name, path)),
                    None => self.globs.push(path),
                }
            }
        }
        self.items.push(item);
    }
}

/// The names that a `use` line brings in, None for a glob, with their paths.
pub(crate) fn leaves(tree: &UseTree) -> Vec<(Option<String>, Names)> {
    fn walk(tree: &UseTree, prefix: &Names, found: &mut Vec<(Option<String>, Names)>) {
        let with = |name: &syn::Ident| {
            let mut path = prefix.clone();
            // `use a::{self}` imports a.
            if name != "self" || path.is_empty() {
                path.push(name.to_string());
            }
            path
        };
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(&path.ident), found),
            UseTree::Name(name) => {
                let path = with(&name.ident);
                found.push((path.last().cloned(), path));
            }
            UseTree::Rename(rename) => {
                found.push((Some(rename.rename.to_string()), with(&rename.ident)));
            }
            UseTree::Glob(_) => found.push((None, prefix.clone())),
            UseTree::Group(group) => {
                for tree in &group.items {
                    walk(tree, prefix, found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, &Vec::new(), &mut found);
    found
}

/// Whether an item is there for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Path>()
                    .is_ok_and(|cfg| cfg.is_ident("test"))
    })
}

fn attributes(item: &Item) -> Option<&[Attribute]> {
    match item {
        Item::Fn(item) => Some(&item.attrs),
        Item::Use(item) => Some(&item.attrs),
        Item::Impl(item) => Some(&item.attrs),
        Item::Const(item) => Some(&item.attrs),
        _ => None,
    }
}

/// The file of `mod name;` in `folder`, and the folder of its own modules.
fn located(attributes: &[Attribute], folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let inner = folder.join(name);
    for attribute in attributes {
        if let syn::Meta::NameValue(value) = &attribute.meta
            && value.path.is_ident("path")
            && let syn::Expr::Lit(literal) = &value.value
            && let syn::Lit::Str(path) = &literal.lit
        {
            return (folder.join(path.value()), inner);
        }
    }
    match inner.join("mod.rs") {
        file if file.exists() => (file, inner),
        _ => (folder.join(format!("{name}.rs")), inner),
    }
}
