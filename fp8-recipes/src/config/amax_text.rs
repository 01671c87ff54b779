//! An amax function in JSON, for `#[serde(with = "..")]`: its name is written, so that a checkpoint can say which function it
//! was trained with, and read as a name that no function is bound to yet.

use fp8_core::{AmaxCompute, CustomAmax};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Before the name of an amax function that was written in code.
const CUSTOM: &str = "custom:";

pub(super) fn serialize<S: Serializer>(
    value: &AmaxCompute,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        AmaxCompute::Custom(custom) => {
            serializer.collect_str(&format_args!("{CUSTOM}{}", custom.name()))
        }
        named => serializer.collect_str(named),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<AmaxCompute, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.strip_prefix(CUSTOM) {
        Some(name) => Ok(AmaxCompute::Custom(CustomAmax::unbound(name))),
        None => text.parse().map_err(D::Error::custom),
    }
}
