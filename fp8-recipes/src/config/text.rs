//! Spellings that fp8-core does not have: abbreviations, and amax functions written in code.

use fp8_core::{AmaxCompute, CustomAmax, Granularity};

use super::ConfigError;

/// Before the name of an amax function that was written in code.
const CUSTOM: &str = "custom:";

/// torchao's abbreviations, and like ones for what it does not have.
pub(super) fn granularity_short(granularity: Granularity) -> String {
    match granularity {
        Granularity::Tensorwise => "ten".to_string(),
        Granularity::Rowwise => "axs".to_string(),
        Granularity::Blockwise { rows, cols } => format!("blk{rows}x{cols}"),
        Granularity::Mx => "mx".to_string(),
    }
}

fn parse_amax_compute(text: &str) -> Result<AmaxCompute, ConfigError> {
    match text.strip_prefix(CUSTOM) {
        Some(name) => Ok(AmaxCompute::Custom(CustomAmax::unbound(name))),
        None => Ok(text.parse()?),
    }
}

/// For `#[serde(with = "..")]`: a function is written by its name, so that a checkpoint can say
/// which one it was trained with, and read as a name that has no function yet.
pub(super) mod amax_compute {
    use fp8_core::AmaxCompute;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &AmaxCompute,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            AmaxCompute::Custom(custom) => {
                serializer.collect_str(&format_args!("{}{}", super::CUSTOM, custom.name()))
            }
            named => serializer.collect_str(named),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<AmaxCompute, D::Error> {
        let text = String::deserialize(deserializer)?;
        super::parse_amax_compute(&text).map_err(D::Error::custom)
    }
}
