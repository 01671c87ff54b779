//! Which layers of a checkpoint are decoded when it is loaded.

use super::{Computation, LayerCase, LayerTiming, LayerTimings};
use crate::error::Result;
use candle_core::{DType, Device};
use fp8_files::load::Checkpoint;
use fp8_files::names::join;
use std::fmt;

/// An FP8 layer of a checkpoint, and how fast its products are.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ServedLayer {
    /// Canonical path.
    pub path: String,
    /// What was timed.
    pub case: LayerCase,
    /// The times; the layer is decoded unless FP8 pays.
    pub timing: LayerTiming,
}

/// What [`decode_where_faster`] has decided for each FP8 layer. Prints as a table.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct ServingReport {
    /// The layers, sorted by path.
    pub layers: Vec<ServedLayer>,
    /// What went wrong with the file of times.
    pub warnings: Vec<String>,
}

impl ServingReport {
    /// The number of decoded layers.
    pub fn decoded(&self) -> usize {
        let layers = self.layers.iter();
        layers.filter(|layer| !layer.timing.fp8_pays).count()
    }
}

impl fmt::Display for ServingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ServedLayer { path, case, timing } in &self.layers {
            let what = match timing.fp8_pays {
                true => "fp8",
                false => "decoded",
            };
            let LayerCase {
                out_features: n,
                in_features: k,
                ..
            } = case;
            writeln!(f, "{path}  [{n}, {k}]  {what}: {timing}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let decoded = self.decoded();
        write!(
            f,
            "{} in fp8, {decoded} decoded",
            self.layers.len() - decoded
        )
    }
}

/// Decodes the FP8 layers of a checkpoint whose products in FP8 are no faster on this machine than products with the decoded weight,
/// for calls of `tokens` rows and inputs of `dtype`: the models that are built from it hold these weights in `dtype`.
///
/// A decoded layer takes four bytes for each weight in f32, and does not cast its inputs, so its results are closer to those of the
/// model before it was quantized. Tokens decide most of it: products of one row wait for the weight to come from memory, of which codes
/// need a quarter, and long prompts do not. A layer has one form for all calls; give the number that takes most of the time.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use fp8::load::Checkpoint;
/// use fp8::timings::{LayerTimings, decode_where_faster};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let mut checkpoint = Checkpoint::open_dir(dir.path())?;
/// let timings = LayerTimings::new();
/// # let timings = timings.without_file().with_budget(std::time::Duration::from_millis(20));
/// let report = decode_where_faster(&mut checkpoint, 1, DType::F32, &Device::Cpu, &timings)?;
/// println!("{report}");
/// assert_eq!(checkpoint.is_decoded("fc"), report.decoded() == 1);
/// let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?;
/// # let _ = vb;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`LayerTimings::get`].
pub fn decode_where_faster(
    checkpoint: &mut Checkpoint,
    tokens: usize,
    dtype: DType,
    device: &Device,
    timings: &LayerTimings,
) -> Result<ServingReport> {
    let mut report = ServingReport::default();
    for path in checkpoint.layer_paths() {
        let shape = checkpoint.shape(&join(&path, "weight"));
        let (Some(scheme), Some(&[n, k])) = (checkpoint.layer_scheme(&path), shape) else {
            continue;
        };
        let case = LayerCase::new(Computation::Served(scheme), (n, k), tokens).with_dtype(dtype);
        let timing = timings.get(&case, device)?;
        if !timing.fp8_pays {
            checkpoint.decode(&path)?;
        }
        report.layers.push(ServedLayer { path, case, timing });
    }
    report.warnings = timings.warnings();
    Ok(report)
}
