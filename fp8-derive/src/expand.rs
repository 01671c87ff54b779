//! The implementation that the derive writes.

use crate::attributes::{skips, trait_crate};
use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use std::collections::HashSet;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Field, Fields, GenericParam, Generics, Path, Result, Type};

pub(crate) fn expand(input: &DeriveInput, default_crate: &str) -> Result<TokenStream> {
    let name = &input.ident;
    let krate = trait_crate(&input.attrs, &name.to_string(), default_crate)?;
    let mut visited = vec![];
    let body = match &input.data {
        Data::Struct(data) => {
            let arm = arm(
                &quote!(Self),
                &data.fields,
                &name.to_string(),
                &mut visited,
                &krate,
            )?;
            quote! { match self { #arm } }
        }
        Data::Enum(data) if data.variants.is_empty() => quote! { match *self {} },
        Data::Enum(data) => {
            let mut arms = TokenStream::new();
            for variant in &data.variants {
                let ident = &variant.ident;
                let place = format!("{name}::{ident}");
                if skips(&variant.attrs, &format!("variant `{place}`"))? {
                    arms.extend(quote! { Self::#ident { .. } => {} });
                    continue;
                }
                arms.extend(arm(
                    &quote!(Self::#ident),
                    &variant.fields,
                    &place,
                    &mut visited,
                    &krate,
                )?);
            }
            quote! { match self { #arms } }
        }
        Data::Union(_) => {
            let message = format!(
                "`Fp8Module` cannot be derived for the union `{name}`: which field is in use is unknown"
            );
            return Err(Error::new_spanned(name, message));
        }
    };
    let generics = with_bounds(&input.generics, &visited, &krate);
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #krate::Fp8Module for #name #type_generics #where_clause {
            fn visit(&self, visitor: &mut dyn #krate::Visitor) {
                // Nothing else uses it in a type without visited fields.
                let _ = &visitor;
                #body
            }
        }
    })
}

/// One arm of the match: binds the fields that are visited and visits them in order.
fn arm<'a>(
    constructor: &TokenStream,
    fields: &'a Fields,
    place: &str,
    visited: &mut Vec<&'a Type>,
    krate: &Path,
) -> Result<TokenStream> {
    let mut bindings = vec![];
    let mut calls = vec![];
    for (index, field) in fields.iter().enumerate() {
        let shown = match &field.ident {
            Some(ident) => format!("field `{ident}` of `{place}`"),
            None => format!("field {index} of `{place}`"),
        };
        if skips(&field.attrs, &shown)? {
            continue;
        }
        visited.push(&field.ty);
        let member = member(field, index);
        // The span of the type, so that the compiler reports a type without `Fp8Module` there.
        let span = field.ty.span().resolved_at(Span::call_site());
        let binding = format_ident!("__fp8_{index}", span = span);
        bindings.push(quote! { #member: #binding });
        let krate = at(span, krate.to_token_stream());
        calls.push(quote_spanned! { span => #krate::Fp8Module::visit(#binding, visitor); });
    }
    Ok(quote! { #constructor { #(#bindings,)* .. } => { #(#calls)* } })
}

fn member(field: &Field, index: usize) -> TokenStream {
    match &field.ident {
        Some(ident) => ident.to_token_stream(),
        None => syn::Index::from(index).to_token_stream(),
    }
}

/// Adds `T: Fp8Module` for each type parameter that a visited field mentions.
fn with_bounds(generics: &Generics, visited: &[&Type], krate: &Path) -> Generics {
    let mut generics = generics.clone();
    let mut mentioned = HashSet::new();
    for ty in visited.iter().filter(|ty| !is_phantom(ty)) {
        idents(ty.to_token_stream(), &mut mentioned);
    }
    for param in &mut generics.params {
        if let GenericParam::Type(param) = param
            && mentioned.contains(&param.ident)
        {
            param.bounds.push(syn::parse_quote!(#krate::Fp8Module));
        }
    }
    generics
}

fn is_phantom(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    let last = path.path.segments.last();
    last.is_some_and(|segment| segment.ident == "PhantomData")
}

/// The same tokens with another span.
fn at(span: Span, tokens: TokenStream) -> TokenStream {
    let token = |mut token: TokenTree| {
        token.set_span(span);
        token
    };
    tokens.into_iter().map(token).collect()
}

fn idents(tokens: TokenStream, into: &mut HashSet<Ident>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                into.insert(ident);
            }
            TokenTree::Group(group) => idents(group.stream(), into),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
