//! From the casts of a calibration to what the file holds of a layer.

use super::options::Ragged;
use crate::autocast::Calibration;
use crate::error::{Error, Result};
use crate::load::InputScheme;
use crate::nn::InputScaling;
use crate::rewrite::Kind;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity, MX_BLOCK, static_dequant_scale};

/// What can be done about a layer whose features cannot be cut into groups.
const EXPORT_WAY_OUT: &str = "leave it in high precision by `PrepareOptions::with_off`, or choose what becomes of it by \
     `ExportOptions::with_ragged`";

impl Kind {
    /// The scheme of a layer calibrated so; None where the recipe leaves its product in high precision.
    pub(crate) fn calibrated(calibration: &Calibration, path: &str) -> Result<Option<Self>> {
        let Calibration { input, weight, .. } = calibration;
        if input.is_disabled() || weight.is_disabled() {
            return Ok(None);
        }
        for (what, cast) in [("inputs were", input), ("weight was", weight)] {
            let format = cast.format.unwrap_or(Format::E4M3);
            if format != Format::E4M3 {
                let reason =
                    format!("its {what} calibrated in {format}, the file holds e4m3 scales");
                return Err(refused(path, reason));
            }
        }
        let input = match input.granularity {
            Granularity::Tensorwise => InputScheme::Static,
            Granularity::Rowwise => InputScheme::PerToken,
            Granularity::Blockwise { rows: 1, cols } => InputScheme::PerGroup(cols),
            Granularity::Mx => InputScheme::Mx,
            other => {
                let reason =
                    format!("inputs scaled {other} have no strategy: a block holds one token");
                return Err(refused(path, reason));
            }
        };
        Ok(Some(Self {
            weight: weight.granularity,
            input,
            power_of_two: calibration.round_scales_to_power_of_two,
            amax_bound: None,
        }))
    }

    /// What an export makes of it for a layer of these sizes; None where it stays in high precision.
    pub(crate) fn cut(
        self,
        sizes: (usize, usize),
        path: &str,
        ragged: Ragged,
    ) -> Result<Option<Self>> {
        let whole = self.check(sizes, path, EXPORT_WAY_OUT);
        if self.ragged(sizes).is_none() {
            return whole.map(|()| Some(self));
        }
        match ragged {
            Ragged::Refuse => whole.map(|()| Some(self)),
            Ragged::Rowwise => Ok(Some(Self {
                weight: Granularity::Rowwise,
                input: InputScheme::PerToken,
                ..self
            })),
            Ragged::HighPrecision => Ok(None),
        }
    }

    /// The scheme of a layer that was loaded in FP8.
    pub(crate) fn of_loaded(
        weight: Granularity,
        input: &InputScaling,
        sizes: (usize, usize),
        path: &str,
    ) -> Result<Self> {
        let scheme = Self::of(weight, input);
        scheme.check(sizes, path, EXPORT_WAY_OUT)?;
        Ok(scheme)
    }

    /// The size of the groups of inputs, where it does not divide the input features.
    fn ragged(&self, (_, k): (usize, usize)) -> Option<usize> {
        let size = match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => MX_BLOCK,
            (_, InputScheme::PerGroup(size)) => size,
            _ => return None,
        };
        (!k.is_multiple_of(size.max(1))).then_some(size)
    }

    /// Whether a weight of these sizes can be cut into its blocks and groups. `way_out` says what can be done where it cannot.
    pub(crate) fn check(&self, sizes: (usize, usize), path: &str, way_out: &str) -> Result<()> {
        match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => {}
            (Granularity::Mx, _) | (_, InputScheme::Mx) => {
                let reason = "microscaled weights go with microscaled inputs only";
                return Err(refused(path, reason.into()));
            }
            _ => {}
        }
        let Some(size) = self.ragged(sizes) else {
            return Ok(());
        };
        let groups = match self.weight {
            Granularity::Mx => "microscaled blocks",
            _ => "groups",
        };
        let features = sizes.1;
        let reason =
            format!("{features} input features are no multiple of {groups} of {size}; {way_out}");
        Err(refused(path, reason))
    }

    /// The codes and scales of a weight. A scale for all of it is the `calibrated` dequant_scale, f32 `[1]`, or made of its amax.
    pub(crate) fn quantize(
        &self,
        weight: &Tensor,
        calibrated: Option<Tensor>,
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
            other => Quantizer::dynamic(Format::E4M3, other).with_power_of_two(self.power_of_two),
        };
        Ok(Fp8Tensor::quantize(weight, &quantizer, Contraction::Cols)?)
    }

    /// The static dequant_scale of inputs whose calibration has found `amax`, f32 `[1]`.
    pub(crate) fn input_scale(&self, amax: f32, device: &Device, path: &str) -> Result<Tensor> {
        static_scale(amax, device, path, "input")
    }
}

fn static_scale(amax: f32, device: &Device, path: &str, role: &str) -> Result<Tensor> {
    let scale = static_dequant_scale(amax, Format::E4M3).map_err(|source| {
        let slot = format!("{path}.{role}");
        fp8_candle::Error::Calibration { slot, source }
    })?;
    Ok(Tensor::from_slice(&[scale], 1, device)?)
}

fn refused(path: &str, reason: String) -> Error {
    Error::NotExportable {
        path: path.to_string(),
        reason,
    }
}
