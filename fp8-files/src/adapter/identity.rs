//! What tells one adapter from another.

use super::config::AdapterConfig;
use super::file::POOLERS;
use crate::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::fingerprint;
use rapidhash::v3::rapidhash_v3;
use std::collections::BTreeMap;

/// 16 digits that differ between adapters which add different updates to weights: a hash of the paths of layers in the adapter, of the factors
/// and of the values of A and B, given by these paths. What changes no weight does not count: dropout, the dtype of the file, the order. The
/// pooler of a BERT counts only in an adapter of nothing else: files have it, and models that give features leave it out. None without an
/// update.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_files::adapter::{AdapterConfig, identity};
/// let a = Tensor::ones((2, 16), DType::BF16, &Device::Cpu)?;
/// let b = Tensor::ones((8, 2), DType::BF16, &Device::Cpu)?;
/// let wide = [a.to_dtype(DType::F32)?, b.to_dtype(DType::F32)?];
/// let of = |config: AdapterConfig, matrices| identity(&config, [Ok(("fc".to_string(), matrices))]);
/// let known = of(AdapterConfig::new(2), [a, b])?;
/// assert_eq!(of(AdapterConfig::new(2), wide.clone())?, known);
/// assert_ne!(of(AdapterConfig::new(2).with_alpha(4.), wide)?, known);
/// # Ok::<(), fp8_files::Error>(())
/// ```
///
/// # Errors
/// Those of `updates`; and if a pattern of `config` is not valid or a tensor cannot be read.
pub fn identity(
    config: &AdapterConfig,
    updates: impl IntoIterator<Item = Result<(String, [Tensor; 2])>>,
) -> Result<Option<String>> {
    let hash = |x: &Tensor| -> Result<u64> {
        let x = x.detach().to_dtype(DType::F32)?.contiguous()?;
        Ok(fingerprint(&x)?)
    };
    let mut parts = BTreeMap::new();
    for update in updates {
        let (path, [a, b]) = update?;
        let numbers = [config.factor_of(&path)?.to_bits(), hash(&a)?, hash(&b)?];
        parts.insert(path, numbers);
    }
    // One adapter must have one identity beside a file, which has the pooler, and in a model of features, which has not.
    if !parts.keys().all(|path| is_pooler(path)) {
        parts.retain(|path, _| !is_pooler(path));
    }
    if parts.is_empty() {
        return Ok(None);
    }
    let mut bytes = vec![];
    for (path, numbers) in parts {
        bytes.extend(path.into_bytes());
        // No path has this byte.
        bytes.push(0);
        bytes.extend(numbers.map(u64::to_le_bytes).concat());
    }
    Ok(Some(format!("{:016x}", rapidhash_v3(&bytes))))
}

/// Whether features can do without the layer at this path of an adapter.
fn is_pooler(path: &str) -> bool {
    POOLERS.contains(&path)
}
