//! `#[derive(Fp8Module)]`: shows every field of a struct or enum to the visitors of `fp8_recipes::Fp8Module`.
//!
//! Use it as `fp8::Fp8Module` or `fp8_recipes::Fp8Module`, where the trait of the same name lives.

#![doc(test(attr(deny(warnings))))]

mod attributes;
mod expand;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

fn derive(input: TokenStream, default_crate: &str) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand::expand(&input, default_crate)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

/// Implements `Fp8Module` by visiting every field, in the order in which they are written.
///
/// Works on structs with named fields, tuple structs, unit structs and enums, with generics, lifetimes and where clauses. A
/// type parameter that occurs in a visited field gets the bound `Fp8Module`.
///
/// | attribute | on | meaning |
/// |---|---|---|
/// | `#[fp8(skip)]` | a field or an enum variant | holds no parameters: not visited, and its type needs no `Fp8Module` |
/// | `#[fp8(crate = "path")]` | the type | where `Fp8Module` and `Visitor` live, for a renamed dependency |
///
/// A skipped field that does hold parameters would be missing in an export;
/// `ExportOptions::with_vars` finds it.
///
/// ```
/// # #![allow(dead_code)]
/// # mod fp8_recipes {
/// #     pub trait Visitor {}
/// #     pub trait Fp8Module { fn visit(&self, visitor: &mut dyn Visitor); }
/// #     impl Fp8Module for f32 { fn visit(&self, _: &mut dyn Visitor) {} }
/// # }
/// # use fp8_derive::Fp8Module;
/// # struct Linear;
/// # impl fp8_recipes::Fp8Module for Linear { fn visit(&self, _: &mut dyn fp8_recipes::Visitor) {} }
/// #[derive(Fp8Module)]
/// # #[fp8(crate = "fp8_recipes")]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
///     dropout: f32,
///     #[fp8(skip)]
///     activation: fn(f32) -> f32,
/// }
/// ```
#[proc_macro_derive(Fp8Module, attributes(fp8))]
pub fn fp8_module(input: TokenStream) -> TokenStream {
    derive(input, "::fp8_recipes")
}

/// [`macro@Fp8Module`] for programs that depend on the `fp8` crate alone, which exports it under that name.
#[proc_macro_derive(Fp8ModuleOfFacade, attributes(fp8))]
pub fn fp8_module_of_facade(input: TokenStream) -> TokenStream {
    derive(input, "::fp8")
}
