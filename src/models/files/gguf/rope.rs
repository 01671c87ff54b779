//! Scaled rotary positions of a GGUF file, as entries of a `config.json`.

use super::GgufError;
use super::file::GgufFile;
use serde_json::{Value, json};

/// Largest relative difference between the factors of `rope_freqs.weight` (f32) and those of the formula.
const FACTOR_TOLERANCE: f32 = 1e-3;

impl GgufFile {
    /// The entry `rope_scaling`; None without scaling.
    pub(super) fn rope_scaling(&self, theta: f64) -> Result<Option<Value>, GgufError> {
        let scaling = self.scaling_entries()?;
        if !self.has("rope_freqs.weight") {
            return Ok(scaling);
        }
        match scaling {
            None => self.llama3_scaling(theta).map(Some),
            Some(_) => {
                let what = "a table `rope_freqs.weight` beside another scaling";
                Err(self.metadata.unsupported(what.to_string()))
            }
        }
    }

    /// The scaling that the metadata describe.
    fn scaling_entries(&self) -> Result<Option<Value>, GgufError> {
        let metadata = &self.metadata;
        // Factors that llama.cpp applies on top of the formula, with their neutral values.
        for (key, usual, expected) in [
            (".rope.scaling.attn_factor", [1.0, 1.0], "1"),
            (".rope.scaling.yarn_attn_factor", [1.0, 1.0], "1"),
            (".rope.scaling.yarn_ext_factor", [1.0, -1.0], "1"),
            (".rope.scaling.yarn_log_multiplier", [0.0, 0.0], "0"),
        ] {
            if metadata
                .float(key)?
                .is_some_and(|value| !usual.contains(&value))
            {
                return Err(metadata.error(key, expected));
            }
        }
        let mut factor_key = ".rope.scaling.factor";
        let mut factor = metadata.float(factor_key)?;
        if factor.is_none() {
            // The name in older files.
            let old = ".rope.scale_linear";
            factor = metadata.float(old)?;
            if factor.is_some() {
                factor_key = old;
            }
        }
        let factor = factor.filter(|&factor| factor != 0.0);
        let kind = match metadata.text(".rope.scaling.type")? {
            Some("none") => return Ok(None),
            // As in llama.cpp, a factor alone divides positions.
            None if factor.is_some() => "linear",
            None => return Ok(None),
            Some(kind @ ("linear" | "yarn")) => kind,
            Some(kind) => return Err(metadata.unsupported(format!("the rope scaling `{kind}`"))),
        };
        let factor = factor.ok_or_else(|| metadata.error(factor_key, "a number other than 0"))?;
        let mut scaling = json!({ "rope_type": kind, "factor": factor });
        if kind == "yarn" {
            let original = metadata.count(".rope.scaling.original_context_length")?;
            if let Some(original) = original {
                scaling["original_max_position_embeddings"] = json!(original);
            }
            for (entry, key) in [
                ("beta_fast", ".rope.scaling.yarn_beta_fast"),
                ("beta_slow", ".rope.scaling.yarn_beta_slow"),
            ] {
                if let Some(beta) = metadata.float(key)? {
                    scaling[entry] = json!(beta);
                }
            }
        }
        Ok(Some(scaling))
    }

    /// Files have the factors of Llama 3 as a table only. The largest is the `factor`; the other settings are the same in
    /// all of Meta's models, which the table is compared with.
    fn llama3_scaling(&self, theta: f64) -> Result<Value, GgufError> {
        let stored = self.stored_f32("rope_freqs.weight")?;
        let table = stored
            .flatten_all()
            .and_then(|table| table.to_vec1::<f32>())
            .map_err(|source| self.tensor_error("rope_freqs.weight", source))?;
        let (low, high, original) = (1.0f64, 4.0f64, 8192.0f64);
        let factor = table.iter().copied().fold(1f32, f32::max);
        let head_dim = self.dimensions.head_dim;
        let expected = |i: usize| -> f32 {
            let wavelength = theta.powf((2 * i) as f64 / head_dim as f64) * std::f64::consts::TAU;
            let smooth = (original / wavelength - low) / (high - low);
            let smooth = smooth.clamp(0.0, 1.0);
            (1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)) as f32
        };
        let near = |(i, x): (usize, &f32)| (x / expected(i) - 1.0).abs() <= FACTOR_TOLERANCE;
        if table.len() != head_dim / 2 || !table.iter().enumerate().all(near) {
            let what = "a table `rope_freqs.weight` that is not Llama 3's".to_string();
            return Err(self.metadata.unsupported(what));
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }))
    }
}
