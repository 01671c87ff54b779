//! The modules of a crate: which file each is in, what it defines and what it imports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use syn::{Attribute, Item, Meta, UseTree};

/// A path of names, as written: `crate::data::Codes`.
pub(crate) type Names = Vec<String>;

/// A module, inline ones included.
#[derive(Default)]
pub(crate) struct Module {
    /// The file it is written in.
    pub(crate) file: PathBuf,
    /// Names that the module defines itself, modules excepted.
    pub(crate) defined: BTreeSet<String>,
    /// The macros among them.
    pub(crate) macros: BTreeSet<String>,
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
    /// Files of test modules, which are not read.
    tests: BTreeSet<PathBuf>,
}

/// Where the modules that a piece of source declares have their files.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// The file that the piece is in.
    file: &'a Path,
    /// The folder of the files of `mod name;`.
    folder: &'a Path,
    /// The folder that `#[path]` starts from.
    of_paths: &'a Path,
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
            tests: BTreeSet::new(),
        };
        let folder = root.parent().unwrap_or(Path::new("")).to_path_buf();
        read.file(Vec::new(), root, &folder)?;
        Ok(read)
    }

    /// The files that were read.
    pub fn files(&self) -> BTreeSet<&Path> {
        let modules = self.modules.values();
        modules.map(|module| module.file.as_path()).collect()
    }

    /// Whether a file is that of a test module, or in the folder of one: such files are not read.
    pub fn is_test(&self, file: &Path) -> bool {
        self.tests.iter().any(|test| {
            let folder = match (test.ends_with("mod.rs"), test.parent()) {
                (true, Some(folder)) => folder.to_path_buf(),
                _ => test.with_extension(""),
            };
            file == test || file.starts_with(folder)
        })
    }

    /// Reads one file; the files of its modules are in `folder`.
    fn file(&mut self, path: Names, file: &Path, folder: &Path) -> Result<(), String> {
        let failed = |reason: String| format!("{}: {reason}", file.display());
        let text = fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
        let parsed = syn::parse_file(&text).map_err(|error| failed(error.to_string()))?;
        let of_paths = file.parent().unwrap_or(Path::new(""));
        let place = Place {
            file,
            folder,
            of_paths,
        };
        self.items(path, parsed.items, place)
    }

    fn items(&mut self, path: Names, items: Vec<Item>, place: Place<'_>) -> Result<(), String> {
        let mut module = Module {
            file: place.file.to_path_buf(),
            ..Module::default()
        };
        for item in items {
            match item {
                Item::Mod(inner) => {
                    let name = inner.ident.to_string();
                    let is_test = is_test(&inner.attrs);
                    let mut path = path.clone();
                    path.push(name.clone());
                    match inner.content {
                        Some(_) if is_test => {}
                        Some((_, items)) => {
                            let folder = &place.folder.join(&name);
                            let inside = Place {
                                file: place.file,
                                folder,
                                of_paths: folder,
                            };
                            self.items(path, items, inside)?;
                        }
                        None => {
                            let (file, folder) = located(&inner.attrs, place, &name);
                            match is_test {
                                true => drop(self.tests.insert(file)),
                                false => self.file(path, &file, &folder)?,
                            }
                        }
                    }
                }
                item if is_test(attributes(&item)) => {}
                Item::Macro(item) if is_exported(&item.attrs) => {
                    // The macro is a name of the crate's root, wherever it is written.
                    if let Some(name) = &item.ident
                        && !path.is_empty()
                    {
                        let mut full = vec!["crate".to_string()];
                        full.extend(path.iter().cloned());
                        full.push(name.to_string());
                        let root = self.modules.entry(Vec::new()).or_default();
                        root.imported.insert(name.to_string(), full);
                    }
                    module.take(Item::Macro(item));
                }
                item => module.take(item),
            }
        }
        // Of the root, what exported macros have put there is kept.
        if let Some(before) = self.modules.remove(&path) {
            module.imported.extend(before.imported);
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
        let name = name.map(ToString::to_string);
        if let Item::Macro(_) = &item {
            self.macros.extend(name.clone());
        }
        self.defined.extend(name);
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

/// Whether an item is there for tests only: `#[test]`, `#[cfg(test)]` or `#[cfg(all(test, ..))]`.
fn is_test(attributes: &[Attribute]) -> bool {
    fn implies_test(cfg: &Meta) -> bool {
        match cfg {
            Meta::Path(path) => path.is_ident("test"),
            Meta::List(list) if list.path.is_ident("all") => {
                let parts = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
                list.parse_args_with(parts)
                    .is_ok_and(|parts| parts.iter().any(implies_test))
            }
            _ => false,
        }
    }
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute.parse_args().is_ok_and(|cfg| implies_test(&cfg))
    })
}

fn is_exported(attributes: &[Attribute]) -> bool {
    let mut attributes = attributes.iter();
    attributes.any(|attribute| attribute.path().is_ident("macro_export"))
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The file of `mod name;`, and the folder of its own modules.
fn located(attributes: &[Attribute], place: Place<'_>, name: &str) -> (PathBuf, PathBuf) {
    for attribute in attributes {
        if let Meta::NameValue(value) = &attribute.meta
            && value.path.is_ident("path")
            && let syn::Expr::Lit(literal) = &value.value
            && let syn::Lit::Str(path) = &literal.lit
        {
            // Such a file has its modules beside it, as a `mod.rs` has.
            let file = plain(&place.of_paths.join(path.value()));
            let folder = file.parent().unwrap_or(Path::new("")).to_path_buf();
            return (file, folder);
        }
    }
    let inner = place.folder.join(name);
    match inner.join("mod.rs") {
        file if file.exists() => (file, inner),
        _ => (place.folder.join(format!("{name}.rs")), inner),
    }
}

/// `a/c` for `a/b/../c`: one file has one name.
fn plain(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        let inside = matches!(found.components().next_back(), Some(Component::Normal(_)));
        match part {
            Component::ParentDir if inside => drop(found.pop()),
            part => found.push(part),
        }
    }
    found
}
