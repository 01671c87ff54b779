//! From the casts of a calibration to what the file holds of a layer.

use crate::error::{Error, Result};
use crate::load::InputScheme;
use crate::nn::InputScaling;
use crate::state::Calibration;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, E8M0, Format, Granularity, MX_BLOCK, static_dequant_scale};

/// How the weights and inputs of a layer are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scheme {
    pub(super) weight: Granularity,
    pub(super) input: InputScheme,
    /// Whether scales that are not static are powers of two.
    pub(super) power_of_two: bool,
}

impl Scheme {
    /// The scheme of a layer calibrated so; None where the recipe leaves its product in high precision.
    pub(super) fn of(
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
        };
        scheme.check(sizes, path)?;
        Ok(Some(scheme))
    }

    /// The scheme of a layer that was loaded in FP8.
    pub(super) fn of_loaded(
        weight: Granularity,
        input: &InputScaling,
        sizes: (usize, usize),
        path: &str,
    ) -> Result<Self> {
        let power_of_two_inputs = input.has_power_of_two_scales();
        let input = match *input {
            InputScaling::None => InputScheme::None,
            InputScaling::Static(_) => InputScheme::Static,
            InputScaling::DynamicPerToken { .. } => InputScheme::PerToken,
            InputScaling::DynamicPerTensor { .. } => InputScheme::PerTensor,
            InputScaling::DynamicPerGroup { size, .. } => InputScheme::PerGroup(size),
            InputScaling::DynamicMx => InputScheme::Mx,
        };
        let scheme = Self {
            weight,
            input,
            power_of_two: power_of_two_inputs,
        };
        scheme.check(sizes, path)?;
        Ok(scheme)
    }

    /// Whether loaders have to be told that input scales are powers of two.
    pub(super) fn has_power_of_two_inputs(&self) -> bool {
        let made_while_running = matches!(
            self.input,
            InputScheme::PerToken | InputScheme::PerTensor | InputScheme::PerGroup(_)
        );
        self.power_of_two && made_while_running
    }

    /// What the configuration says of it.
    pub(super) fn group(&self) -> (Granularity, InputScheme) {
        (self.weight, self.input)
    }

    fn check(&self, (_, k): (usize, usize), path: &str) -> Result<()> {
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
    pub(super) fn quantize(&self, weight: &Tensor, path: &str) -> Result<Fp8Tensor> {
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
    pub(super) fn input_scale(&self, amax: f32, device: &Device, path: &str) -> Result<Tensor> {
        static_scale(amax, device, path, "input")
    }

    /// The scales of a weight as the file holds them.
    pub(super) fn stored_scale(&self, codes: &Fp8Tensor, path: &str) -> Result<Tensor> {
        let scale = codes.dequant_scale();
        match self.weight {
            Granularity::Tensorwise => Ok(scale.reshape(1)?),
            Granularity::Mx => {
                let values = scale.flatten_all()?.to_vec1::<f32>()?;
                let bytes: Option<Vec<u8>> = values.iter().map(|&value| exponent(value)).collect();
                let bytes = bytes.ok_or_else(|| {
                    refused(path, "a scale of its weight is no power of two".into())
                })?;
                Ok(Tensor::from_vec(bytes, scale.dims(), scale.device())?)
            }
            _ => Ok(scale.clone()),
        }
    }
}

fn static_scale(amax: f32, device: &Device, path: &str, role: &str) -> Result<Tensor> {
    let scale = static_dequant_scale(amax, Format::E4M3).map_err(|source| {
        let slot = format!("{path}.{role}");
        fp8_candle::Error::Calibration { slot, source }
    })?;
    Ok(Tensor::from_slice(&[scale], 1, device)?)
}

/// The E8M0 byte of a power of two; None of any other number.
fn exponent(value: f32) -> Option<u8> {
    let scale = E8M0::from_f32(value);
    (scale.to_f32() == value).then(|| scale.to_bits())
}

fn refused(path: &str, reason: String) -> Error {
    Error::NotExportable {
        path: path.to_string(),
        reason,
    }
}
