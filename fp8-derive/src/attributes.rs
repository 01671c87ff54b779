//! `#[fp8(..)]`: the accepted contents, and an error that names the place of anything else.

use syn::{Attribute, LitStr, Path, Result};

/// Whether the attributes of a field or variant hold `#[fp8(skip)]`. `place` names it in errors.
pub(crate) fn skips(attributes: &[Attribute], place: &str) -> Result<bool> {
    let mut skip = false;
    for attribute in attributes.iter().filter(|a| a.path().is_ident("fp8")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("skip") {
                let found = text(&meta.path);
                let message = format!(
                    "{place}: unknown attribute `{found}`; only `#[fp8(skip)]` exists here"
                );
                return Err(meta.error(message));
            }
            if skip {
                return Err(meta.error(format!("{place}: `skip` is given twice")));
            }
            skip = true;
            Ok(())
        })?;
    }
    Ok(skip)
}

/// The crate that the trait lives in: that of `#[fp8(crate = "..")]`, or `default`.
pub(crate) fn trait_crate(attributes: &[Attribute], name: &str, default: &str) -> Result<Path> {
    let mut path = None;
    for attribute in attributes.iter().filter(|a| a.path().is_ident("fp8")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("crate") {
                let found = text(&meta.path);
                let message = format!(
                    "`{name}`: unknown attribute `{found}`; only `#[fp8(crate = \"..\")]` exists on a type, and \
                     `#[fp8(skip)]` on a field"
                );
                return Err(meta.error(message));
            }
            if path.is_some() {
                return Err(meta.error(format!("`{name}`: `crate` is given twice")));
            }
            path = Some(meta.value()?.parse::<LitStr>()?.parse()?);
            Ok(())
        })?;
    }
    match path {
        Some(path) => Ok(path),
        None => syn::parse_str(default),
    }
}

fn text(path: &Path) -> String {
    let segments = path.segments.iter().map(|s| s.ident.to_string());
    segments.collect::<Vec<_>>().join("::")
}
