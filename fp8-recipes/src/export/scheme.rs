//! From the casts of a calibration to what the file holds of a layer.

use crate::error::{Error, Result};
use crate::load::InputScheme;
use crate::nn::InputScaling;
use crate::rewrite::Kind;
use crate::state::Calibration;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity, MX_BLOCK, static_dequant_scale};

impl Kind {
    /// The scheme of a layer calibrated so; None where the recipe leaves its product in high precision.
    pub(crate) fn calibrated(
        calibration: &Calibration,
        sizes: (usize, usize),
        path: &str,
    ) -> Result<Option<Self>> {
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
        let scheme = Self {
            weight: weight.granularity,
            input,
            power_of_two: calibration.round_scales_to_power_of_two,
            amax_bound: None,
        };
        scheme.check(sizes, path)?;
        Ok(Some(scheme))
    }

    /// The scheme of a layer that was loaded in FP8.
    pub(crate) fn of_loaded(
        weight: Granularity,
        input: &InputScaling,
        sizes: (usize, usize),
        path: &str,
    ) -> Result<Self> {
        let scheme = Self::of(weight, input);
        scheme.check(sizes, path)?;
        Ok(scheme)
    }

    /// Whether a weight of these sizes can be cut into its blocks and groups.
    pub(crate) fn check(&self, (_, k): (usize, usize), path: &str) -> Result<()> {
        let whole = |size: usize, what: &str| match k.is_multiple_of(size.max(1)) {
            true => Ok(()),
            false => Err(refused(
                path,
                format!("{k} input features are no multiple of {what} of {size}"),
            )),
        };
        match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => {
                whole(MX_BLOCK, "microscaled blocks")
            }
            (Granularity::Mx, _) | (_, InputScheme::Mx) => Err(refused(
                path,
                "microscaled weights go with microscaled inputs only".into(),
            )),
            (_, InputScheme::PerGroup(size)) => whole(size, "groups"),
            _ => Ok(()),
        }
    }

    /// The codes and scales of a weight as it is now, which is the calibrated one unless the model was trained further.
    pub(crate) fn quantize(&self, weight: &Tensor, path: &str) -> Result<Fp8Tensor> {
        let quantizer = match self.weight {
            Granularity::Tensorwise => {
                let amax = weight.abs()?.flatten_all()?.max(0)?;
                let amax = amax.to_dtype(DType::F32)?.to_scalar()?;
                let dequant_scale = static_scale(amax, weight.device(), path, "weight")?;
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
