//! Post-training quantization: a trained model is calibrated on some batches and then computes in FP8 with static scales.

use crate::config::{CastConfig, Fp8LinearConfig};
use crate::error::{Error, ExportError, Result};
use crate::module::{Fp8Module, for_each_layer};
use crate::{Autocast, LayerReport, Outcome, PrepareOptions, PrepareReport, prepare_fp8, with_fp8};
use fp8_core::Format;

/// The formats of inputs and weights after training.
///
/// The FP8 Emulation Toolkit's scheme `hybrid` has E4M3 inputs and weights in E3M4, a format that this library does not have;
/// [`PtqScheme::E4m3`] is the closest to it, and has the formats of the forward pass of hybrid training.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{Format, PtqScheme};
/// assert_eq!(PtqScheme::default(), PtqScheme::E4m3);
/// assert_eq!(PtqScheme::E5m2.input(), Format::E5M2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PtqScheme {
    /// Inputs and weights in E4M3.
    #[default]
    E4m3,
    /// Inputs and weights in E5M2: more range, less precision.
    E5m2,
}

impl PtqScheme {
    /// Format of the inputs of a layer.
    pub fn input(self) -> Format {
        match self {
            Self::E4m3 => Format::E4M3,
            Self::E5m2 => Format::E5M2,
        }
    }

    /// Format of the weights.
    pub fn weight(self) -> Format {
        self.input()
    }

    /// The casts: inputs with one calibrated scale for the tensor, weights with a scale for each output channel.
    pub fn config(self) -> Fp8LinearConfig {
        let input = CastConfig::static_tensorwise().with_format(self.input());
        let weight = CastConfig::dynamic_rowwise().with_format(self.weight());
        Fp8LinearConfig::default()
            .with_input(input)
            .with_weight(weight)
    }
}

names! { PtqScheme::name, pub ALL: E4m3 = "e4m3", E5m2 = "e5m2" }

/// A model that [`quantize_model`] has calibrated.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct QuantizedModel {
    /// The formats.
    pub scheme: PtqScheme,
    /// Every linear layer, and which of them compute in FP8.
    pub report: PrepareReport,
}

impl QuantizedModel {
    /// The options of an evaluation guard under which the model computes in FP8. Outside of such a guard it computes as before.
    pub fn autocast(&self) -> Autocast {
        Autocast::new(self.scheme.config()).training(false)
    }
}

/// Prepares the linear layers and convolutions of `model` and runs `calibration`, which runs batches through it in high precision.
/// Under [`QuantizedModel::autocast`] they then compute with one static scale per input, from the largest amax of the batches, and
/// with weight codes that are made once and have a scale per output channel.
///
/// Fold batch norms in before ([`nn::fuse_batch_norm`](crate::nn::fuse_batch_norm)). A calibrated model with weights in
/// E4M3 is written for serving by [`save_calibrated`](crate::save_calibrated). `options` may leave layers out.
///
/// # Errors
/// If no layer is prepared ([`ExportError::NothingToQuantize`]; operators do not count), a prepared one has met no batch
/// ([`ExportError::NotCalibrated`]), `calibration` fails, or an input is not finite. An earlier calibration is discarded in any
/// case: the new scales come from these batches only.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{PrepareOptions, PtqScheme, nn, quantize_model, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let batches: Vec<_> = (0..4).map(|_| Tensor::randn(0f32, 1., (8, 32), &Device::Cpu)).collect::<Result<_, _>>()?;
/// # let model = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// let quantized = quantize_model(&model, PtqScheme::E4m3, &PrepareOptions::default(), || {
///     batches.iter().try_for_each(|x| model.forward(x).map(|_| ()))
/// })?;
/// let y = with_fp8(quantized.autocast(), || model.forward(&batches[0]))?;
/// let exact = model.forward(&batches[0])?;
/// let noise = (y - &exact)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
/// assert!(noise < 0.01 * exact.sqr()?.sum_all()?.to_scalar::<f32>()?);
/// # Ok(()) }
/// ```
pub fn quantize_model<M: Fp8Module + ?Sized, R>(
    model: &M,
    scheme: PtqScheme,
    options: &PrepareOptions,
    calibration: impl FnOnce() -> candle_core::Result<R>,
) -> Result<QuantizedModel> {
    let report = prepare_fp8(model, options)?;
    let converts = |layer: &&LayerReport| {
        layer.kind.multiplies() && matches!(layer.outcome, Outcome::Converted(_))
    };
    if !report.layers.iter().any(|layer| converts(&layer)) {
        return Err(ExportError::NothingToQuantize.into());
    }
    // Otherwise amaxes of earlier calibrations would be mixed in, and would hide layers that no batch reaches.
    for_each_layer(model, |layer| {
        if let Some(state) = layer.fp8_state() {
            state.set_calibration(None);
            for (_, slot) in state.slots() {
                slot.reset_calibration();
            }
        }
    });
    let autocast = Autocast::new(scheme.config()).calibrating(true);
    with_fp8(autocast, || calibration().map_err(Error::from))?;
    let mut missed = None;
    for_each_layer(model, |layer| {
        let state = layer.fp8_state();
        if let Some(state) = state.filter(|state| state.calibration().is_none()) {
            missed.get_or_insert(state.path().to_string());
        }
    });
    match missed {
        Some(path) => Err(ExportError::NotCalibrated { path }.into()),
        None => Ok(QuantizedModel { scheme, report }),
    }
}
