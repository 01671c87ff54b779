//! How a layer is stored and how its inputs are scaled: the one form shared by reading, rewriting and exporting.
//!
//! Every family of checkpoints is brought into it. Codes are E4M3 `[out, in]`, scales run along `in`, and value = code * scale. Schemes
//! differ in which weights share a scale, and in how inputs are scaled.

use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity, MX_BLOCK, ScaleGrid, static_dequant_scale};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Metadata entry of a file: a JSON list of the layers whose dynamic input scales are powers of two. The configuration has no key for
/// it.
pub const POWER_OF_TWO_INPUTS: &str = "fp8_power_of_two_inputs";

/// How inputs are scaled. A static scale is a tensor of the file, read when the layer is.
pub type InputScheme = InputScaling<()>;

/// How one layer is stored and computed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerScheme {
    /// Which elements of the weight share a scale.
    pub weight: Granularity,
    /// How inputs are scaled.
    pub input: InputScheme,
}

impl LayerScheme {
    /// The scheme of a weight of this granularity in a layer with this input scaling.
    pub fn of<S>(weight: Granularity, input: &InputScaling<S>) -> Self {
        let Ok::<_, std::convert::Infallible>(input) = input.with_scale(|_| Ok(()));
        Self { weight, input }
    }

    /// The same scheme with input scales that are not rounded to powers of two.
    pub fn with_exact_inputs(self) -> Self {
        let input = self.input.with_power_of_two(false);
        Self { input, ..self }
    }

    /// The scheme as a tensor of bytes: a VarBuilder returns nothing else.
    pub(crate) fn to_tensor(self) -> candle_core::Result<Tensor> {
        let json = serde_json::to_vec(&self).map_err(candle_core::Error::wrap)?;
        Tensor::new(json, &Device::Cpu)
    }

    /// The inverse of [`LayerScheme::to_tensor`].
    pub(crate) fn from_tensor(tensor: &Tensor) -> candle_core::Result<Self> {
        serde_json::from_slice(&tensor.to_vec1::<u8>()?).map_err(candle_core::Error::wrap)
    }

    /// Whether microscaling is mixed with other scales. Microscaled weights need microscaled inputs, or inputs in high precision.
    pub(crate) fn mixes_microscaling(&self) -> bool {
        match (self.weight, self.input) {
            (Granularity::Mx, input) => {
                !matches!(input, InputScheme::DynamicMx | InputScheme::None)
            }
            (_, input) => input == InputScheme::DynamicMx,
        }
    }

    /// The size of the groups of inputs, where it does not divide the input features.
    fn ragged_group(&self, (_, k): (usize, usize)) -> Option<usize> {
        let size = match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::DynamicMx | InputScheme::None) => MX_BLOCK,
            (_, InputScheme::DynamicPerGroup { size, .. }) => size,
            _ => return None,
        };
        (!k.is_multiple_of(size.max(1))).then_some(size)
    }

    /// Whether the input features of a layer of these sizes (output and input features) do not divide into whole groups.
    pub fn is_ragged(&self, sizes: (usize, usize)) -> bool {
        self.ragged_group(sizes).is_some()
    }

    /// Checks that a weight of these sizes divides into its blocks and groups. `way_out` tells the user what to do where it does not.
    ///
    /// # Errors
    /// [`Error::NotExportable`].
    pub fn check(&self, sizes: (usize, usize), path: &str, way_out: &str) -> Result<()> {
        if self.mixes_microscaling() {
            let reason = "microscaled weights go with microscaled inputs only";
            return Err(Error::not_exportable(path, reason));
        }
        let Some(size) = self.ragged_group(sizes) else {
            return Ok(());
        };
        let groups = match self.weight {
            Granularity::Mx => "microscaled blocks",
            _ => "groups",
        };
        let features = sizes.1;
        let reason = format!(
            "{features} input features are not a multiple of {groups} of {size}; {way_out}"
        );
        Err(Error::not_exportable(path, reason))
    }

    /// Quantizes a weight. A tensorwise scale is the `calibrated` dequant_scale, f32 `[1]`, or computed from the amax, and the weight is
    /// divided by it; other scales are computed from their amaxes, and rounded to powers of two if `power_of_two`.
    ///
    /// # Errors
    /// If the weight's amax is not finite, or an operation fails.
    pub fn quantize(
        &self,
        weight: &Tensor,
        calibrated: Option<Tensor>,
        power_of_two: bool,
        path: &str,
    ) -> Result<Fp8Tensor> {
        let quantizer = match self.weight {
            Granularity::Tensorwise => {
                let dequant_scale = match calibrated {
                    Some(dequant_scale) => dequant_scale,
                    None => {
                        let amax = weight.abs()?.flatten_all()?.max(0)?;
                        let amax = amax.to_dtype(DType::F32)?.to_scalar()?;
                        static_scale(amax, weight.device(), path, "weight")?
                    }
                };
                let source = ScaleSource::Fixed { dequant_scale };
                Quantizer::new(Cast::new(Format::E4M3), Granularity::Tensorwise, source)
            }
            other => Quantizer::dynamic(Format::E4M3, other).with_power_of_two(power_of_two),
        };
        Ok(Fp8Tensor::quantize(weight, &quantizer, Contraction::Cols)?)
    }
}

/// The static dequant_scale for a calibrated `amax`, f32 `[1]`. `role` is "weight" or "input", for errors.
pub(crate) fn static_scale(amax: f32, device: &Device, path: &str, role: &str) -> Result<Tensor> {
    let scale = static_dequant_scale(amax, Format::E4M3).map_err(|source| {
        let slot = format!("{path}.{role}");
        fp8_candle::Error::Calibration { slot, source }
    })?;
    Ok(Tensor::from_slice(&[scale], 1, device)?)
}

impl fmt::Display for LayerScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} weights with ", self.weight)?;
        match self.input {
            InputScheme::None => f.write_str("inputs in high precision"),
            InputScheme::Static(()) => f.write_str("static input scales"),
            InputScheme::DynamicPerToken { .. } => f.write_str("inputs scaled per token"),
            InputScheme::DynamicPerTensor { .. } => f.write_str("inputs scaled per tensor"),
            InputScheme::DynamicPerGroup { size, .. } => {
                write!(f, "inputs scaled per group of {size}")
            }
            InputScheme::DynamicMx => f.write_str("microscaled inputs"),
        }?;
        if self.input.has_power_of_two_scales() {
            f.write_str(", input scales powers of two")?;
        }
        match self.input.amax_bound() {
            Some(bound) => write!(f, ", whose amax counts up to {bound}"),
            None => Ok(()),
        }
    }
}

/// Blocks of files without a configuration.
const BLOCKS: Granularity = Granularity::Blockwise {
    rows: 128,
    cols: 128,
};

/// The granularity of an `[n, k]` weight whose scale tensor has the shape `scale`; None if no rule fits.
pub(crate) fn granularity_by_shape(scale: &[usize], n: usize, k: usize) -> Option<Granularity> {
    [Granularity::Tensorwise, Granularity::Rowwise, BLOCKS]
        .into_iter()
        .find(|granularity| has_shape(scale, *granularity, n, k))
}

/// Whether scales of this shape are those of an `[n, k]` weight.
pub(crate) fn has_shape(scale: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
    let grid = grid(granularity, n, k);
    let grid = (grid.scale_rows(), grid.scale_cols());
    match (granularity, scale) {
        (Granularity::Tensorwise, [] | [1] | [1, 1]) => true,
        (Granularity::Rowwise, [rows] | [rows, 1]) => *rows == n,
        // The scale of a weight of one block may be a single number.
        (Granularity::Blockwise { .. }, [] | [1]) => grid == (1, 1),
        (Granularity::Blockwise { .. } | Granularity::Mx, [r, c])
        | (Granularity::Blockwise { .. }, [r, 1, c, 1])
        // Blocks along the rows only.
        | (Granularity::Blockwise { rows: 1, .. }, [r, c, 1]) => grid == (*r, *c),
        _ => false,
    }
}

/// The scales of an `[n, k]` weight.
pub(crate) fn grid(granularity: Granularity, n: usize, k: usize) -> ScaleGrid {
    granularity.grid(n, k, Contraction::Cols)
}

/// The shapes that [`has_shape`] accepts, for messages.
pub(crate) fn shapes_text(granularity: Option<Granularity>, n: usize, k: usize) -> String {
    let shape = |granularity: Granularity| {
        let grid = grid(granularity, n, k);
        let (r, c) = (grid.scale_rows(), grid.scale_cols());
        match granularity {
            Granularity::Tensorwise => "[1]".into(),
            Granularity::Rowwise => format!("[{n}, 1]"),
            Granularity::Blockwise { rows, cols } => {
                format!("[{r}, {c}] for blocks of {rows}x{cols}")
            }
            Granularity::Mx => format!("[{r}, {c}] for blocks of 1x{MX_BLOCK}"),
        }
    };
    let shapes = match granularity {
        None => format!("[1], [{n}, 1] or {}", shape(BLOCKS)),
        Some(granularity) => shape(granularity),
    };
    format!("{shapes} for a weight of [{n}, {k}]")
}
