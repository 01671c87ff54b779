//! The paths that a piece of source writes, in its macros too.

use crate::module::{Names, leaves};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use std::collections::BTreeMap;
use syn::visit::{self, Visit};

/// All paths of a module.
#[derive(Default)]
pub(crate) struct Paths {
    /// What the code uses.
    pub(crate) used: Vec<Names>,
    /// The names of macros that it calls by one name.
    pub(crate) macros: Vec<String>,
    /// What `pub use` hands on, of which the file's own code uses nothing.
    pub(crate) handed_on: Vec<Names>,
    /// The `use` lines of the functions around.
    scopes: Vec<Scope>,
}

#[derive(Default)]
struct Scope {
    imported: BTreeMap<String, Names>,
    globs: Vec<Names>,
}

impl Paths {
    /// A path of the code, whose first name may come from the `use` lines of a function.
    fn push(&mut self, path: Names) {
        for scope in self.scopes.iter().rev() {
            if let Some(start) = scope.imported.get(&path[0]) {
                let mut full = start.clone();
                full.extend_from_slice(&path[1..]);
                return self.used.push(full);
            }
            for glob in &scope.globs {
                let mut full = glob.clone();
                full.extend_from_slice(&path);
                self.used.push(full);
            }
        }
        self.used.push(path);
    }

    /// The paths in what a macro is given or made of; `prefix` is what stands before a group of a `use` line.
    fn tokens(&mut self, stream: TokenStream, prefix: &Names) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let is = |at: usize, wanted: char| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == wanted);
        let colons = |at: usize| {
            is(at, ':')
                && is(at + 1, ':')
                && matches!(&tokens[at], TokenTree::Punct(punct) if punct.spacing() == Spacing::Joint)
        };
        let mut at = 0;
        while at < tokens.len() {
            let before = at.checked_sub(1);
            let follows = |wanted| before.is_some_and(|before| is(before, wanted));
            match &tokens[at] {
                TokenTree::Group(group) => self.tokens(group.stream(), &Vec::new()),
                TokenTree::Ident(first) => {
                    let is_range = at >= 2 && is(at - 2, '.');
                    let field = follows('.') && !is_range;
                    let fragment = follows('$') && first != "crate";
                    let mut path = prefix.clone();
                    path.push(first.to_string());
                    let mut group = None;
                    while colons(at + 1) {
                        match tokens.get(at + 3) {
                            Some(TokenTree::Ident(next)) => path.push(next.to_string()),
                            Some(TokenTree::Group(inner))
                                if inner.delimiter() == Delimiter::Brace =>
                            {
                                group = Some(inner.stream());
                            }
                            _ => break,
                        }
                        at += 3;
                    }
                    match group {
                        _ if field || fragment || follows('\'') => {}
                        Some(group) => self.tokens(group, &path),
                        None => self.push(path),
                    }
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }

    /// The paths in strings: `#[serde(with = "crate::hex")]`.
    fn strings(&mut self, stream: TokenStream) {
        for token in stream {
            match token {
                TokenTree::Group(group) => self.strings(group.stream()),
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    let text = text.trim_matches('"');
                    if text.contains("::")
                        && let Ok(path) = syn::parse_str(text)
                    {
                        self.push(names(&path));
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let paths = leaves(&item.tree).into_iter().map(|(_, path)| path);
        // A `pub use` hands names on: the file's own code does not depend on them, unless it uses them elsewhere.
        match item.vis {
            syn::Visibility::Inherited => self.used.extend(paths),
            _ => self.handed_on.extend(paths),
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.push(names(path));
        visit::visit_path(self, path);
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let mut scope = Scope::default();
        for statement in &block.stmts {
            if let syn::Stmt::Item(syn::Item::Use(item)) = statement {
                for (name, path) in leaves(&item.tree) {
                    match name {
                        Some(name) => drop(scope.imported.insert(name, path)),
                        None => scope.globs.push(path),
                    }
                }
            }
        }
        self.scopes.push(scope);
        visit::visit_block(self, block);
        self.scopes.pop();
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.macros
            .extend(call.path.get_ident().map(ToString::to_string));
        self.tokens(call.tokens.clone(), &Vec::new());
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta
            && !list.path.is_ident("cfg")
        {
            self.tokens(list.tokens.clone(), &Vec::new());
            self.strings(list.tokens.clone());
        }
    }

    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}
}

fn names(path: &syn::Path) -> Names {
    let segments = path.segments.iter();
    segments.map(|segment| segment.ident.to_string()).collect()
}
