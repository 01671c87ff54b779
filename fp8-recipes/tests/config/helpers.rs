//! Shorthands for resolving configurations and reading JSON.

use fp8_recipes::config::*;

pub const DYN: CastConfig = CastConfig::dynamic_tensorwise();

pub fn resolved(name: &str) -> ResolvedConfig {
    name.parse::<Recipe>().unwrap().resolve().unwrap()
}

pub fn error(config: Fp8LinearConfig) -> ConfigError {
    config.resolve().unwrap_err()
}

pub fn json_error<T: serde::de::DeserializeOwned + std::fmt::Debug>(json: &str) -> String {
    serde_json::from_str::<T>(json).unwrap_err().to_string()
}

pub fn round_trip(recipe: &Recipe) -> Recipe {
    serde_json::from_str(&serde_json::to_string(recipe).unwrap()).unwrap()
}
