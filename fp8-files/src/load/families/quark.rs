//! AMD's Quark.

use super::fp8::{block_sizes, size};
use super::modules::{Modules, matches_glob};
use crate::error::{Error, Result};
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(in crate::load) struct Quark {
    path: PathBuf,
    /// Of all layers that nothing else names.
    all: Option<LayerScheme>,
    /// By globs.
    some: Vec<Named>,
    excluded: Modules,
}

/// An entry of `layer_quant_config`.
#[derive(Debug)]
struct Named {
    glob: String,
    /// Where it stands.
    key: String,
    scheme: Option<LayerScheme>,
}

impl Quark {
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        let export = at.get("export");
        export
            .get("weight_format")
            .must_be(&[Value::Null, json!("real_quantized")])?;
        export
            .get("pack_method")
            .must_be(&[Value::Null, json!("reorder"), json!("order")])?;
        let mut some = vec![];
        for (glob, entry) in at.get("layer_quant_config").named_entries()? {
            some.push(Named {
                glob: glob.to_string(),
                key: entry.key().to_string(),
                scheme: scheme(&entry)?,
            });
        }
        let mut all = scheme(&at.get("global_quant_config"))?;
        for (class, entry) in at.get("layer_type_quant_config").named_entries()? {
            // The class that our layers stand for.
            if class.ends_with("Linear") {
                all = scheme(&entry)?;
            }
        }
        let mut excluded = Modules::default();
        excluded.add_globs(&at.get("exclude"))?;
        Ok(Self {
            path: at.file(),
            all,
            some,
            excluded,
        })
    }
}

/// What is done to layers; None if their weights stay in high precision.
fn scheme(at: &At<'_>) -> Result<Option<LayerScheme>> {
    let weight = at.get("weight");
    if weight.is_null() {
        return Ok(None);
    }
    let tensors = at.get("input_tensors");
    let mut scheme = LayerScheme::new(granularity(&weight)?, inputs(&tensors)?);
    scheme.power_of_two_inputs = matches!(
        scheme.input,
        Some(InputScheme::PerToken | InputScheme::PerTensor | InputScheme::PerGroup(_))
    ) && has_powers(&tensors);
    Ok(Some(scheme))
}

fn check_type(at: &At<'_>) -> Result<()> {
    at.get("dtype").must_be(&[json!("fp8_e4m3")])?;
    at.get("symmetric").must_be(&[json!(true), Value::Null])
}

/// Whether scales are powers of two.
fn has_powers(at: &At<'_>) -> bool {
    at.get("scale_type")
        .value
        .as_str()
        .is_some_and(|name| name.contains("e8m0"))
        || at
            .get("scale_format")
            .value
            .as_str()
            .is_some_and(|name| name.contains("e8m0"))
}

fn granularity(at: &At<'_>) -> Result<Granularity> {
    const EXPECTED: &str =
        "per_tensor, per_channel of axis 0, per_block, or per_group of 32 with e8m0 scales";
    check_type(at)?;
    at.get("is_dynamic").must_be(&[json!(false), Value::Null])?;
    let scheme = at.get("qscheme");
    let group = size(at.get("group_size").value);
    match scheme.text(EXPECTED)? {
        "per_tensor" => Ok(Granularity::Tensorwise),
        "per_channel" => {
            at.get("ch_axis").must_be(&[json!(0), Value::Null])?;
            Ok(Granularity::Rowwise)
        }
        "per_block" => match block_sizes(&at.get("block_size"))? {
            Some((rows, cols)) => Ok(Granularity::Blockwise { rows, cols }),
            None => Err(at.get("block_size").unsupported("[rows, cols]")),
        },
        "per_group" if group == Some(MX_BLOCK) && has_powers(at) => Ok(Granularity::Mx),
        _ => Err(scheme.unsupported(EXPECTED)),
    }
}

fn inputs(at: &At<'_>) -> Result<InputScheme> {
    const EXPECTED: &str = "per_tensor, or dynamic per_token, per_channel or per_group";
    if at.is_null() {
        return Ok(InputScheme::None);
    }
    check_type(at)?;
    let scheme = at.get("qscheme");
    let dynamic = at.get("is_dynamic");
    dynamic.must_be(&[json!(true), json!(false), Value::Null])?;
    let is_dynamic = dynamic.value == &json!(true);
    let group = size(at.get("group_size").value).filter(|size| *size > 0);
    match (scheme.text(EXPECTED)?, is_dynamic, group) {
        ("per_tensor", false, _) => Ok(InputScheme::Static),
        ("per_tensor", true, _) => Ok(InputScheme::PerTensor),
        ("per_token" | "per_channel", true, _) => Ok(InputScheme::PerToken),
        ("per_group", true, Some(MX_BLOCK)) if has_powers(at) => Ok(InputScheme::Mx),
        ("per_group", true, Some(size)) => Ok(InputScheme::PerGroup(size)),
        _ => Err(scheme.unsupported(EXPECTED)),
    }
}

impl Family for Quark {
    fn name(&self) -> FamilyName {
        FamilyName::Quark
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        if self.excluded.name(path) {
            return Ok(None);
        }
        let mut named = self
            .some
            .iter()
            .filter(|named| matches_glob(path, &named.glob));
        let Some(first) = named.next() else {
            return Ok(self.all);
        };
        // The first in the file would count, but the order of a map is not kept here.
        match named.find(|other| other.scheme != first.scheme) {
            None => Ok(first.scheme),
            Some(other) => Err(Error::Ambiguous {
                path: self.path.clone(),
                tensor: path.to_string(),
                first: first.key.clone(),
                second: other.key.clone(),
            }),
        }
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
