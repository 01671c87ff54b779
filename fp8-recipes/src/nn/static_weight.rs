//! FP8 weights of a checkpoint: codes only, no high-precision copy.

use super::join;
use crate::check::check_scale_values;
use crate::error::{Error, Result};
use crate::load::{InputScheme, LayerScheme};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::{
    Fp8Tensor, GemmPlan, LinearPlan, LinearWeight, PackedWeight, Quantizer, ScalePolicy,
    ScaleSource, fp8_linear,
};
use fp8_core::{Cast, Contraction, Format, Granularity};
use std::sync::Arc;

/// What becomes of the input of a static layer before the product.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum InputScaling {
    /// It stays in high precision and is multiplied by the dequantized weight (weight-only checkpoints).
    None,
    /// Cast with a scale from the checkpoint: dequant_scale, f32 `[1]`.
    Static(Tensor),
    /// Cast with a scale from each token's own amax.
    DynamicPerToken {
        /// Whether scales are powers of two.
        power_of_two: bool,
        /// A larger amax counts as this one, and values beyond it saturate (FBGEMM's `activation_scale_ub`).
        amax_bound: Option<f32>,
    },
    /// Cast with a scale from the tensor's own amax.
    DynamicPerTensor {
        /// Whether the scale is a power of two.
        power_of_two: bool,
        /// A larger amax counts as this one, and values beyond it saturate.
        amax_bound: Option<f32>,
    },
    /// Cast with a scale from the amax of each group of inputs of a token.
    DynamicPerGroup {
        /// Inputs in a group.
        size: usize,
        /// Whether scales are powers of two.
        power_of_two: bool,
    },
    /// Cast with a power of two from the amax of each 32 inputs of a token (OCP microscaling).
    DynamicMx,
}

impl InputScaling {
    /// The cast; None where there is none.
    fn quantizer(&self) -> Option<Quantizer> {
        let granularity = match self {
            InputScaling::None => return None,
            InputScaling::Static(dequant_scale) => {
                let dequant_scale = dequant_scale.clone();
                let source = ScaleSource::Fixed { dequant_scale };
                let cast = Cast::new(Format::E4M3);
                return Some(Quantizer::new(cast, Granularity::Tensorwise, source));
            }
            InputScaling::DynamicPerToken { .. } => Granularity::Rowwise,
            InputScaling::DynamicPerTensor { .. } => Granularity::Tensorwise,
            InputScaling::DynamicPerGroup { size, .. } => Granularity::Blockwise {
                rows: 1,
                cols: (*size).max(1),
            },
            InputScaling::DynamicMx => Granularity::Mx,
        };
        let power_of_two = self.has_power_of_two_scales();
        let policy = match granularity {
            Granularity::Mx => ScalePolicy::Mx,
            // Powers of two are rounded from the scale that trains, so that what was trained with them serves to the bit.
            _ if power_of_two => ScalePolicy::Dynamic,
            _ => ScalePolicy::Inference,
        };
        let source = ScaleSource::Current {
            policy,
            power_of_two,
        };
        let quantizer = Quantizer::new(Cast::new(Format::E4M3), granularity, source);
        Some(quantizer.with_amax_bound(self.amax_bound()))
    }

    /// The largest amax that counts, where there is a bound.
    pub(crate) fn amax_bound(&self) -> Option<f32> {
        match *self {
            InputScaling::DynamicPerToken { amax_bound, .. }
            | InputScaling::DynamicPerTensor { amax_bound, .. } => amax_bound,
            _ => None,
        }
    }

    /// Whether scales that are made of the inputs are rounded down to powers of two; microscaling has its own rule.
    pub(crate) fn has_power_of_two_scales(&self) -> bool {
        match *self {
            InputScaling::None | InputScaling::Static(_) | InputScaling::DynamicMx => false,
            InputScaling::DynamicPerToken { power_of_two, .. }
            | InputScaling::DynamicPerTensor { power_of_two, .. }
            | InputScaling::DynamicPerGroup { power_of_two, .. } => power_of_two,
        }
    }
}

/// An FP8 weight with its scales, and how inputs are cast for it.
#[derive(Debug, Clone)]
pub struct StaticWeight {
    weight: PackedWeight,
    input: InputScaling,
    plan: Arc<LinearPlan>,
}

impl StaticWeight {
    /// `codes`: `[out_features, in_features]`, scales along in_features; laid out for its device.
    ///
    /// # Errors
    /// If `codes` is not a matrix.
    pub fn new(codes: &Fp8Tensor, input: InputScaling, path: &str) -> Result<Self> {
        // The weight is codes already; its quantizer is never asked.
        let dequant_scale = codes.dequant_scale().clone();
        let source = ScaleSource::Fixed { dequant_scale };
        let b = Quantizer::new(Cast::new(codes.format()), codes.granularity(), source);
        let output = input
            .quantizer()
            .map(|a| GemmPlan::new(a, b).with_fast_accum(true));
        let plan = LinearPlan::new(path).with_output(output);
        Ok(Self {
            weight: PackedWeight::new(codes)?,
            input,
            plan: plan.into(),
        })
    }

    /// The weight as the layer holds it.
    pub fn weight(&self) -> &PackedWeight {
        &self.weight
    }

    /// The codes, row-major, and their scales. Where the device has its own form of them, the first call makes a copy,
    /// which stays.
    pub fn codes(&self) -> &Fp8Tensor {
        self.weight.codes()
    }

    /// How inputs get their scale.
    pub fn input_scaling(&self) -> &InputScaling {
        &self.input
    }

    pub(super) fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(fp8_linear(
            x,
            LinearWeight::Packed(&self.weight),
            bias,
            &self.plan,
        )?)
    }

    /// Loads `weight` with `weight_scale` and, if there, `input_scale` from `vb`; None where `vb` has no
    /// `weight_scale`, which is the mark of an FP8 weight. A VarBuilder of ours says how the layer is stored; with any
    /// other the shapes decide.
    pub(super) fn load(n: usize, k: usize, vb: &VarBuilder<'_>) -> Result<Option<Self>> {
        let path = vb.prefix();
        let name = join(&path, "weight");
        if !crate::load::holds(vb, "weight_scale") {
            if let Ok(Some(LayerScheme {
                weight: Some(scales),
                ..
            })) = crate::load::scheme(vb)
            {
                tracing::info!(
                    layer = path,
                    "in high precision, though the configuration gives it {scales} FP8 weights"
                );
            }
            return Ok(None);
        }
        let scheme = crate::load::scheme(vb)?;
        // Our own VarBuilder hands out the bytes of the file, which then are the codes, without a copy.
        let stored = match scheme {
            Some(_) => DType::U8,
            None => DType::F8E4M3,
        };
        let weight = vb.get_with_hints_dtype((n, k), "weight", Default::default(), stored)?;
        check_payload(vb, &weight, &name, (n, k))?;
        let scale_name = join(&path, "weight_scale");
        let scale = vb.get_unchecked_dtype("weight_scale", DType::F32)?;
        // Our own VarBuilder has checked the scales.
        if scheme.is_none() {
            check_scale_values(&scale_name, &scale)?;
        }
        let told = scheme.and_then(|scheme| scheme.weight);
        let granularity = told
            .or_else(|| crate::load::granularity_by_shape(scale.dims(), n, k))
            .ok_or_else(|| Error::TensorShape {
                tensor: scale_name,
                got: scale.dims().to_vec(),
                expected: crate::load::shapes_text(told, n, k),
            })?;
        let (scale, along) = (scale.contiguous()?, Contraction::Cols);
        let codes = match scheme {
            Some(_) => Fp8Tensor::from_parts(weight, Format::E4M3, granularity, along, scale)?,
            None => Fp8Tensor::from_f8e4m3(&weight, granularity, along, scale)?,
        };
        let amax_bound = scheme.and_then(|scheme| scheme.amax_bound);
        let power_of_two = scheme.is_some_and(|scheme| scheme.power_of_two_inputs);
        let input = match scheme.and_then(|scheme| scheme.input) {
            Some(InputScheme::None) => InputScaling::None,
            Some(InputScheme::Static) => InputScaling::Static(input_scale(vb, &path)?),
            Some(InputScheme::PerToken) => InputScaling::DynamicPerToken {
                power_of_two,
                amax_bound,
            },
            Some(InputScheme::PerTensor) => InputScaling::DynamicPerTensor {
                power_of_two,
                amax_bound,
            },
            Some(InputScheme::PerGroup(size)) => {
                InputScaling::DynamicPerGroup { size, power_of_two }
            }
            Some(InputScheme::Mx) => InputScaling::DynamicMx,
            None if vb.contains_tensor("input_scale") => {
                InputScaling::Static(input_scale(vb, &path)?)
            }
            None => InputScaling::DynamicPerToken {
                power_of_two,
                amax_bound,
            },
        };
        Self::new(&codes, input, &path).map(Some)
    }
}

/// The static scale of a layer's inputs, f32 `[1]`.
fn input_scale(vb: &VarBuilder<'_>, path: &str) -> Result<Tensor> {
    let name = join(path, "input_scale");
    let scale = vb.get_unchecked_dtype("input_scale", DType::F32)?;
    if scale.elem_count() != 1 {
        return Err(Error::TensorShape {
            tensor: name,
            got: scale.dims().to_vec(),
            expected: "one element".into(),
        });
    }
    check_scale_values(&name, &scale)?;
    Ok(scale.reshape(1)?)
}

/// A stock VarBuilder casts whatever it holds to the dtype asked for; codes that do not give back the stored values
/// were no codes.
fn check_payload(
    vb: &VarBuilder<'_>,
    codes: &Tensor,
    name: &str,
    shape: (usize, usize),
) -> Result<()> {
    // Our own VarBuilder has checked the dtype, and hands out scaled values below. On a GPU candle 0.11 casts nothing to
    // or from F8E4M3, so codes that arrive there were stored as such.
    if crate::load::is_checked(vb) || codes.device().is_cuda() {
        return Ok(());
    }
    let unscaled = Fp8Tensor::from_f8e4m3(
        codes,
        Granularity::Tensorwise,
        Contraction::Cols,
        Tensor::ones(1, DType::F32, codes.device())?,
    )?;
    let stored = vb.get_with_hints_dtype(shape, "weight", Default::default(), DType::F32)?;
    let decoded = unscaled.dequantize(DType::F32)?;
    let differing = stored
        .ne(&decoded)?
        .to_dtype(DType::U32)?
        .sum_all()?
        .to_scalar::<u32>()?;
    let nans = decoded
        .ne(&decoded)?
        .to_dtype(DType::U32)?
        .sum_all()?
        .to_scalar::<u32>()?;
    if differing > nans {
        return Err(Error::TensorDType {
            tensor: name.to_string(),
            got: "another dtype than FP8, beside a weight_scale".into(),
            expected: "F8_E4M3".into(),
        });
    }
    Ok(())
}

/// Whether high-precision values are in fact FP8 codes without their scale: every one of them is an E4M3 value and
/// the largest fills the format, which only a quantized weight does.
///
/// A stock VarBuilder hands such a weight out with no error.
pub(super) fn is_unscaled_fp8(weight: &Tensor) -> Result<bool> {
    const FULL: f32 = 224.;
    if weight.elem_count() == 0 {
        return Ok(false);
    }
    let first = weight
        .flatten_all()?
        .narrow(0, 0, weight.elem_count().min(64))?;
    if !all_e4m3(&first)? {
        return Ok(false);
    }
    let amax = weight
        .to_dtype(DType::F32)?
        .abs()?
        .flatten_all()?
        .max(0)?
        .to_scalar::<f32>()?;
    Ok(amax >= FULL && all_e4m3(&weight.flatten_all()?)?)
}

fn all_e4m3(x: &Tensor) -> Result<bool> {
    let values = x.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let cast = Cast::new(Format::E4M3);
    Ok(values
        .iter()
        .all(|&value| Format::E4M3.decode(cast.encode(value, 0)) == value))
}
