//! The sources of a crate: its modules with their items, imports and impls, files followed and macros expanded.

use crate::expand::Macros;
use crate::signature::text;
use quote::ToTokens;
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, ItemImpl, Meta, UseTree, Visibility};

pub struct Source {
    pub name: String,
    /// The first one is the root.
    pub modules: Vec<Module>,
    macros: Macros,
}

pub struct Module {
    pub parent: Option<usize>,
    pub items: Vec<Definition>,
    pub imports: Vec<Import>,
    pub impls: Vec<(String, ItemImpl)>,
}

pub struct Definition {
    pub name: String,
    pub public: bool,
    /// Its `#[cfg(..)]`, if any.
    pub cfg: String,
    pub what: What,
}

pub enum What {
    /// Another of the modules.
    Module(usize),
    Item(Box<Item>),
}

/// One name that a `use` brings in, or all of a module's.
pub struct Import {
    /// `None` for a glob.
    pub name: Option<String>,
    pub path: Vec<String>,
    pub public: bool,
    pub cfg: String,
}

/// Where the items of a module stand, and where the files of its modules lie.
#[derive(Clone)]
struct Place {
    file: PathBuf,
    children: PathBuf,
}

impl Source {
    /// # Errors
    /// If a file cannot be read or is no Rust.
    pub fn read(name: &str, root: &Path) -> Result<Self, String> {
        let mut source = Self {
            name: name.to_string(),
            modules: vec![],
            macros: Macros::default(),
        };
        let place = Place {
            file: root.to_path_buf(),
            children: folder(root),
        };
        let items = parse(root)?;
        source.add_module(None, items, &place)?;
        Ok(source)
    }

    fn add_module(
        &mut self,
        parent: Option<usize>,
        items: Vec<Item>,
        place: &Place,
    ) -> Result<usize, String> {
        let at = self.modules.len();
        self.modules.push(Module {
            parent,
            items: vec![],
            imports: vec![],
            impls: vec![],
        });
        for item in items {
            self.add(at, item, place)?;
        }
        Ok(at)
    }

    fn add(&mut self, at: usize, item: Item, place: &Place) -> Result<(), String> {
        let Some(cfg) = cfg(attributes(&item)) else {
            return Ok(());
        };
        let mut define = |name: String, public: bool, what: What| {
            self.modules[at].items.push(Definition {
                name,
                public,
                cfg: cfg.clone(),
                what,
            });
        };
        match item {
            Item::Use(item) => {
                let public = is_public(&item.vis);
                let imports = &mut self.modules[at].imports;
                flatten(&item.tree, &mut vec![], &mut |name, path| {
                    imports.push(Import {
                        name,
                        path,
                        public,
                        cfg: cfg.clone(),
                    });
                });
            }
            Item::Impl(item) => self.modules[at].impls.push((cfg, item)),
            Item::Mod(module) => {
                let name = module.ident.to_string();
                let public = is_public(&module.vis);
                let (items, place) = match module.content {
                    Some((_, items)) => {
                        let children = place.children.join(&name);
                        let file = place.file.clone();
                        (items, Place { file, children })
                    }
                    None => {
                        let place = module_file(&name, &module.attrs, place)?;
                        (parse(&place.file)?, place)
                    }
                };
                let index = self.add_module(Some(at), items, &place)?;
                self.modules[at].items.push(Definition {
                    name,
                    public,
                    cfg,
                    what: What::Module(index),
                });
            }
            Item::Macro(item) => match &item.ident {
                Some(name) => {
                    self.macros.define(name.to_string(), &item.mac);
                    // Exported macros stand at the root.
                    if item.attrs.iter().any(|a| a.path().is_ident("macro_export")) {
                        self.modules[0].items.push(Definition {
                            name: name.to_string(),
                            public: true,
                            cfg,
                            what: What::Item(Box::new(Item::Macro(item))),
                        });
                    }
                }
                None => {
                    for item in self.macros.expand(&item.mac) {
                        self.add(at, item, place)?;
                    }
                }
            },
            item => {
                if let Some((name, public)) = name_and_visibility(&item) {
                    define(name, public, What::Item(Box::new(item)));
                }
            }
        }
        Ok(())
    }
}

fn parse(file: &Path) -> Result<Vec<Item>, String> {
    let at = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = fs::read_to_string(file).map_err(|error| at(&error))?;
    Ok(syn::parse_file(&text).map_err(|error| at(&error))?.items)
}

fn folder(file: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).to_path_buf()
}

/// The file of `mod name;`.
fn module_file(name: &str, attributes: &[Attribute], place: &Place) -> Result<Place, String> {
    for attribute in attributes.iter().filter(|a| a.path().is_ident("path")) {
        if let Ok(value) = attribute.meta.require_name_value()
            && let syn::Expr::Lit(literal) = &value.value
            && let syn::Lit::Str(path) = &literal.lit
        {
            let file = folder(&place.file).join(path.value());
            let children = folder(&file);
            return Ok(Place { file, children });
        }
    }
    let children = place.children.join(name);
    let candidates = [
        place.children.join(format!("{name}.rs")),
        children.join("mod.rs"),
    ];
    let file = candidates.into_iter().find(|file| file.is_file());
    let file = file.ok_or_else(|| {
        let from = place.file.display();
        format!(
            "{from}: `mod {name};` has no file in {}",
            place.children.display()
        )
    })?;
    Ok(Place { file, children })
}

/// The names of a `use`, each with its path.
fn flatten(
    tree: &UseTree,
    path: &mut Vec<String>,
    found: &mut dyn FnMut(Option<String>, Vec<String>),
) {
    match tree {
        UseTree::Path(tree) => {
            path.push(tree.ident.to_string());
            flatten(&tree.tree, path, found);
            path.pop();
        }
        UseTree::Name(tree) if tree.ident == "self" => found(path.last().cloned(), path.clone()),
        UseTree::Name(tree) => {
            let name = tree.ident.to_string();
            found(Some(name.clone()), [path.as_slice(), &[name]].concat());
        }
        UseTree::Rename(tree) => {
            let mut path = path.clone();
            if tree.ident != "self" {
                path.push(tree.ident.to_string());
            }
            found(Some(tree.rename.to_string()), path);
        }
        UseTree::Glob(_) => found(None, path.clone()),
        UseTree::Group(tree) => tree.items.iter().for_each(|t| flatten(t, path, found)),
    }
}

pub fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// The conditions of the attributes as text; `None` for what only tests have.
pub fn cfg(attributes: &[Attribute]) -> Option<String> {
    let mut all = String::new();
    for attribute in attributes.iter().filter(|a| a.path().is_ident("cfg")) {
        let Meta::List(list) = &attribute.meta else {
            continue;
        };
        let condition = text(list.tokens.clone());
        if ["test", "doctest"].contains(&condition.as_str()) || condition.starts_with("all(test") {
            return None;
        }
        all += &format!("#[cfg({condition})] ");
    }
    Some(all)
}

pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name_and_visibility(item: &Item) -> Option<(String, bool)> {
    let (name, visibility) = match item {
        Item::Const(item) => (&item.ident, &item.vis),
        Item::Enum(item) => (&item.ident, &item.vis),
        Item::Fn(item) => (&item.sig.ident, &item.vis),
        Item::Static(item) => (&item.ident, &item.vis),
        Item::Struct(item) => (&item.ident, &item.vis),
        Item::Trait(item) => (&item.ident, &item.vis),
        Item::Type(item) => (&item.ident, &item.vis),
        Item::Union(item) => (&item.ident, &item.vis),
        _ => return None,
    };
    Some((name.to_token_stream().to_string(), is_public(visibility)))
}
