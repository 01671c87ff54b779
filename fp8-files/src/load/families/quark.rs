//! AMD's Quark.

use super::compressed_tensors::input_by_strategy;
use super::modules::{Modules, matches_glob};
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family, agreed};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::json;

impl FamilyName {
    /// AMD's Quark.
    pub const QUARK: Self = Self::new("quark");
}

pub(super) fn parse(at: &At<'_>) -> Result<Family> {
    let export = at.get("export");
    export
        .get("weight_format")
        .must_be(json!([null, "real_quantized"]))?;
    export
        .get("pack_method")
        .must_be(json!([null, "reorder", "order"]))?;
    // Globs, each with the key of its entry and what that declares.
    let mut named = vec![];
    for (glob, entry) in at.get("layer_quant_config").entries()? {
        let declared = declared(&entry)?;
        named.push((glob.to_string(), (entry.key, declared)));
    }
    let mut all = declared(&at.get("global_quant_config"))?;
    for (class, entry) in at.get("layer_type_quant_config").entries()? {
        // The class of all layers that are read here.
        if class.ends_with("Linear") {
            all = declared(&entry)?;
        }
    }
    let excluded = Modules::globs(at, &["exclude"])?;
    let source = at.path.to_path_buf();
    let layer = move |path: &str| {
        if excluded.name(path) {
            return Ok(None);
        }
        let entries = named.iter().filter(|(glob, _)| matches_glob(path, glob));
        let named = agreed(&source, path, entries.map(|(_, entry)| entry))?;
        Ok(named.unwrap_or(all))
    };
    Ok(Family::new(FamilyName::QUARK, Some(at.path), layer))
}

/// What an entry declares; None if weights stay in high precision.
fn declared(at: &At<'_>) -> Result<Option<Declared>> {
    let weight = at.get("weight");
    if weight.is_null() {
        return Ok(None);
    }
    let inputs = inputs(&at.get("input_tensors"))?;
    Ok(Some(Declared::new(granularity(&weight)?, inputs)))
}

fn check_type(at: &At<'_>) -> Result<()> {
    at.get("dtype").must_be(json!(["fp8_e4m3"]))?;
    at.get("symmetric").must_be(json!([true, null]))
}

/// Whether scales are powers of two.
fn has_powers(at: &At<'_>) -> bool {
    let is_e8m0 = |key| {
        let name = at.get(key).value.as_str();
        name.is_some_and(|name| name.contains("e8m0"))
    };
    is_e8m0("scale_type") || is_e8m0("scale_format")
}

fn granularity(at: &At<'_>) -> Result<Granularity> {
    const EXPECTED: &str =
        "per_tensor, per_channel of axis 0, per_block, or per_group of 32 with e8m0 scales";
    check_type(at)?;
    at.get("is_dynamic").must_be(json!([false, null]))?;
    let scheme = at.get("qscheme");
    let group = at.get("group_size").size();
    match scheme.text(EXPECTED)? {
        "per_tensor" => Ok(Granularity::Tensorwise),
        "per_channel" => {
            at.get("ch_axis").must_be(json!([0, null]))?;
            Ok(Granularity::Rowwise)
        }
        "per_block" => at.get("block_size").blocks(),
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
    dynamic.must_be(json!([true, false, null]))?;
    let strategy = match scheme.text(EXPECTED)? {
        "per_channel" => "token",
        name => name.strip_prefix("per_").unwrap_or_default(),
    };
    let (dynamic, powers) = (dynamic.value == &json!(true), has_powers(at));
    input_by_strategy(strategy, dynamic, &at.get("group_size"), powers)
        .map(|input| input.with_power_of_two(powers))
        .ok_or_else(|| scheme.unsupported(EXPECTED))
}
