//! Items as lines: one for the item, one for each public field, variant, method and impl.

use crate::documented::has_example;
use crate::listing::{Entry, Kind};
use crate::signature::text;
use crate::source::{attributes, cfg, is_public};
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Fields, FnArg, Generics, Ident, ImplItem, Item, ItemImpl, ItemTrait, Pat, Path,
    Signature, Token, TraitItem, Visibility,
};

/// The lines of an item with this path. Methods and impls of a type are not among them.
pub fn item(item: &Item, path: &str, cfg: &str) -> Vec<Entry> {
    let entry = |kind, line: String| member(attributes(item), path, kind, cfg, &line);
    let own_type = |keyword: &str, generics: &Generics, rest: &str| {
        let line = format!("pub {keyword} {path}{}{rest}", generics_text(generics));
        entry(Some(Kind::Type), line)
    };
    let mut entries = match item {
        Item::Fn(item) => vec![entry(
            Some(Kind::Function),
            format!("pub {}", signature(&item.sig, path)),
        )],
        Item::Const(item) => vec![entry(
            None,
            format!("pub const {path}: {}", tokens(&item.ty)),
        )],
        Item::Static(item) => vec![entry(
            None,
            format!("pub static {path}: {}", tokens(&item.ty)),
        )],
        Item::Type(item) => {
            vec![own_type(
                "type",
                &item.generics,
                &format!(" = {}", tokens(&item.ty)),
            )]
        }
        Item::Struct(item) => {
            let mut entries = vec![own_type(
                "struct",
                &item.generics,
                hidden_fields(&item.fields),
            )];
            entries.extend(fields(&item.fields, path, cfg, false));
            entries
        }
        Item::Union(item) => {
            let mut entries = vec![own_type("union", &item.generics, "")];
            entries.extend(fields(
                &Fields::Named(item.fields.clone()),
                path,
                cfg,
                false,
            ));
            entries
        }
        Item::Enum(item) => {
            let mut entries = vec![own_type("enum", &item.generics, "")];
            for variant in &item.variants {
                let path = format!("{path}::{}", variant.ident);
                let tuple = match &variant.fields {
                    Fields::Unnamed(fields) => {
                        let types: Vec<String> =
                            fields.unnamed.iter().map(|f| tokens(&f.ty)).collect();
                        format!("({})", types.join(", "))
                    }
                    _ => String::new(),
                };
                let value = variant.discriminant.as_ref();
                let value =
                    value.map_or(String::new(), |(_, value)| format!(" = {}", tokens(value)));
                let marks = self::marks(&variant.attrs);
                entries.push(Entry::plain(
                    &path,
                    format!("{cfg}{marks}{path}{tuple}{value}"),
                ));
                if let Fields::Named(_) = variant.fields {
                    entries.extend(fields(&variant.fields, &path, cfg, true));
                }
            }
            entries
        }
        Item::Trait(item) => {
            let supertraits = match item.supertraits.is_empty() {
                true => String::new(),
                false => format!(": {}", tokens(&item.supertraits)),
            };
            let unsafety = item.unsafety.map_or("", |_| "unsafe ");
            let generics = generics_text(&item.generics);
            let line = format!("pub {unsafety}trait {path}{generics}{supertraits}");
            let mut entries = vec![entry(Some(Kind::Trait), line)];
            entries.extend(trait_items(item, path, cfg));
            entries
        }
        Item::Macro(_) => vec![entry(Some(Kind::Function), format!("macro {path}!"))],
        _ => vec![],
    };
    entries.extend(derives(attributes(item), path, cfg));
    entries
}

/// A line with its attributes. What is hidden from the documentation needs no example.
fn member(
    attributes: &[Attribute],
    path: &str,
    kind: Option<Kind>,
    cfg: &str,
    line: &str,
) -> Entry {
    let marks = marks(attributes);
    Entry {
        path: path.to_string(),
        line: format!("{cfg}{marks}{line}"),
        kind: kind.filter(|_| !marks.contains("doc(hidden)")),
        example: has_example(attributes),
    }
}

/// The public items of an inherent impl.
pub fn methods(block: &ItemImpl, path: &str, outer: &str) -> Vec<Entry> {
    let mut entries = vec![];
    let generics = impl_generics(&block.generics);
    for item in &block.items {
        let (attributes, visibility, name, kind, line) = match item {
            ImplItem::Fn(item) => {
                let path = format!("{path}::{}", item.sig.ident);
                let line = signature(&item.sig, &path);
                (&item.attrs, &item.vis, path, Some(Kind::Method), line)
            }
            ImplItem::Const(item) => {
                let path = format!("{path}::{}", item.ident);
                let line = format!("const {path}: {}", tokens(&item.ty));
                (&item.attrs, &item.vis, path, None, line)
            }
            _ => continue,
        };
        let (true, Some(own)) = (is_public(visibility), cfg(attributes)) else {
            continue;
        };
        entries.push(member(
            attributes,
            &name,
            kind,
            &format!("{outer}{own}"),
            &format!("{generics}pub {line}"),
        ));
    }
    entries
}

/// `impl Trait for Type`: the trait by its last name, a type of this crate by its path.
pub fn trait_impl(block: &ItemImpl, of: &Path, path: &str, own: Option<&str>, cfg: &str) -> Entry {
    let of = of.segments.last().map(tokens).unwrap_or_default();
    let ty = match (own, &*block.self_ty) {
        (Some(own), syn::Type::Path(ty)) => {
            let arguments = ty.path.segments.last().map(|s| tokens(&s.arguments));
            own.to_string() + &arguments.unwrap_or_default()
        }
        (_, ty) => tokens(ty),
    };
    let generics = impl_generics(&block.generics);
    let generics = generics.trim_start_matches("impl").trim_end();
    let bounds = where_text(&block.generics);
    Entry::plain(path, format!("{cfg}impl{generics} {of} for {ty}{bounds}"))
}

fn trait_items(item: &ItemTrait, path: &str, outer: &str) -> Vec<Entry> {
    let mut entries = vec![];
    for item in &item.items {
        let (attributes, name, kind, line) = match item {
            TraitItem::Fn(item) => {
                let path = format!("{path}::{}", item.sig.ident);
                let provided = if item.default.is_some() {
                    " { .. }"
                } else {
                    ""
                };
                let line = signature(&item.sig, &path) + provided;
                (&item.attrs, path, Some(Kind::Method), line)
            }
            TraitItem::Type(item) => {
                let path = format!("{path}::{}", item.ident);
                let bounds = match item.bounds.is_empty() {
                    true => String::new(),
                    false => format!(": {}", tokens(&item.bounds)),
                };
                let line = format!("type {path}{}{bounds}", generics_text(&item.generics));
                (&item.attrs, path, None, line)
            }
            TraitItem::Const(item) => {
                let path = format!("{path}::{}", item.ident);
                let provided = if item.default.is_some() { " = .." } else { "" };
                let line = format!("const {path}: {}{provided}", tokens(&item.ty));
                (&item.attrs, path, None, line)
            }
            _ => continue,
        };
        entries.push(member(attributes, &name, kind, outer, &line));
    }
    entries
}

/// The public fields; all of them where they are those of a variant.
fn fields(fields: &Fields, path: &str, outer: &str, of_variant: bool) -> Vec<Entry> {
    let mut entries = vec![];
    for (i, field) in fields.iter().enumerate() {
        if let (true, Some(own)) = (of_variant || is_public(&field.vis), cfg(&field.attrs)) {
            let name = field.ident.as_ref().map_or(i.to_string(), Ident::to_string);
            let path = format!("{path}::{name}");
            let line = format!(
                "{outer}{own}{}{path}: {}",
                marks(&field.attrs),
                tokens(&field.ty)
            );
            entries.push(Entry::plain(&path, line));
        }
    }
    entries
}

/// Says that a struct has fields that users cannot name.
fn hidden_fields(fields: &Fields) -> &'static str {
    let private = |vis: &Visibility| !is_public(vis);
    match fields.iter().any(|field| private(&field.vis)) {
        true => " { .. }",
        false => "",
    }
}

/// A line for each derived trait.
fn derives(attributes: &[Attribute], path: &str, cfg: &str) -> Vec<Entry> {
    let mut entries = vec![];
    for attribute in attributes.iter().filter(|a| a.path().is_ident("derive")) {
        let parse = Punctuated::<Path, Token![,]>::parse_terminated;
        for of in attribute.parse_args_with(parse).unwrap_or_default() {
            let of = of.segments.last().map(tokens).unwrap_or_default();
            entries.push(Entry::plain(path, format!("{cfg}impl {of} for {path}")));
        }
    }
    entries
}

/// The attributes that users notice.
fn marks(attributes: &[Attribute]) -> String {
    let mut marks = String::new();
    for attribute in attributes {
        let meta = tokens(&attribute.meta);
        let noticed = ["non_exhaustive", "doc(hidden)"].contains(&meta.as_str());
        if noticed || attribute.path().is_ident("repr") {
            marks += &format!("#[{meta}] ");
        } else if attribute.path().is_ident("deprecated") {
            marks += "#[deprecated] ";
        }
    }
    marks
}

fn tokens(part: &(impl ToTokens + ?Sized)) -> String {
    text(part.to_token_stream())
}

/// The signature with the path in the place of the name. `mut` before an argument is no part of it.
fn signature(signature: &Signature, path: &str) -> String {
    let mut named = signature.clone();
    named.ident = Ident::new("PATH__", Span::call_site());
    for argument in &mut named.inputs {
        if let FnArg::Typed(argument) = argument
            && let Pat::Ident(name) = &mut *argument.pat
        {
            name.mutability = None;
        }
    }
    let line = tokens(&named).replacen("PATH__", path, 1);
    line.replacen("(mut self", "(self", 1)
}

/// `<T: A> where ..`
fn generics_text(generics: &Generics) -> String {
    tokens(generics) + &where_text(generics)
}

fn where_text(generics: &Generics) -> String {
    match &generics.where_clause {
        Some(clause) => format!(" {}", tokens(clause)),
        None => String::new(),
    }
}

/// `impl<T: A> `, or nothing.
fn impl_generics(generics: &Generics) -> String {
    if generics.params.is_empty() {
        return String::new();
    }
    let stream: TokenStream = quote!(impl #generics);
    text(stream) + " "
}
