//! A linear layer's weight that is held as FP8 codes only, as FP8 models are served.

use crate::base::error::Result;
use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::ScaleSource;
use crate::cast::tensor::Fp8Tensor;
use crate::device::ScalePolicy;
use crate::layers::linear::{GemmPlan, LinearPlan, LinearWeight, fp8_linear};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Contraction, Format, Granularity};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How the input of a static layer is cast before the product: divided by its scale, as compressed-tensors does it, and vLLM for
/// scales of tokens; its kernel for one static scale multiplies by the reciprocal. Scales that are powers of two multiply; the result
/// is the same.
///
/// `S` is the scale of [`InputScaling::Static`]: a tensor in a layer, `()` where files and configurations only describe the layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum InputScaling<S = Tensor> {
    /// It stays in high precision and is multiplied by the dequantized weight (weight-only checkpoints).
    None,
    /// Cast with a scale from the checkpoint: dequant_scale, f32 `[1]`.
    Static(S),
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
    /// The cast, if there is one.
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
            // Power-of-two scales use the training formula, so that serving gives the bits of training.
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

    /// The values that a layer multiplies its weight by for the input `x`, `[.., in_features]`: cast and dequantized in f32, or `x` in f32
    /// where inputs stay in high precision.
    ///
    /// # Errors
    /// If the features do not divide into the groups, or an operation fails.
    pub fn multiplied(&self, x: &Tensor) -> Result<Tensor> {
        match self.quantizer() {
            None => Ok(x.to_dtype(DType::F32)?),
            Some(cast) => Fp8Tensor::quantize(x, &cast, Contraction::Cols)?.dequantize(DType::F32),
        }
    }
}

impl<S> InputScaling<S> {
    /// One scale per token, neither rounded nor bounded.
    pub const fn per_token() -> Self {
        Self::DynamicPerToken {
            power_of_two: false,
            amax_bound: None,
        }
    }

    /// One scale per tensor, neither rounded nor bounded.
    pub const fn per_tensor() -> Self {
        Self::DynamicPerTensor {
            power_of_two: false,
            amax_bound: None,
        }
    }

    /// One scale per `size` inputs of a token, not rounded.
    pub const fn per_group(size: usize) -> Self {
        Self::DynamicPerGroup {
            size,
            power_of_two: false,
        }
    }

    /// Sets whether scales computed from the inputs are powers of two. Has no effect on the other variants.
    #[must_use]
    pub fn with_power_of_two(mut self, rounded: bool) -> Self {
        if let Self::DynamicPerToken { power_of_two, .. }
        | Self::DynamicPerTensor { power_of_two, .. }
        | Self::DynamicPerGroup { power_of_two, .. } = &mut self
        {
            *power_of_two = rounded;
        }
        self
    }

    /// The same scaling, its static scale replaced by what `scale` returns for it.
    ///
    /// # Errors
    /// The error of `scale`.
    pub fn with_scale<T, E>(
        &self,
        scale: impl FnOnce(&S) -> Result<T, E>,
    ) -> Result<InputScaling<T>, E> {
        Ok(match *self {
            Self::None => InputScaling::None,
            Self::Static(ref of) => InputScaling::Static(scale(of)?),
            Self::DynamicPerToken {
                power_of_two,
                amax_bound,
            } => InputScaling::DynamicPerToken {
                power_of_two,
                amax_bound,
            },
            Self::DynamicPerTensor {
                power_of_two,
                amax_bound,
            } => InputScaling::DynamicPerTensor {
                power_of_two,
                amax_bound,
            },
            Self::DynamicPerGroup { size, power_of_two } => {
                InputScaling::DynamicPerGroup { size, power_of_two }
            }
            Self::DynamicMx => InputScaling::DynamicMx,
        })
    }

    /// The upper bound of amaxes, if there is one.
    pub fn amax_bound(&self) -> Option<f32> {
        match *self {
            Self::DynamicPerToken { amax_bound, .. }
            | Self::DynamicPerTensor { amax_bound, .. } => amax_bound,
            _ => None,
        }
    }

    /// Whether scales computed from the inputs are rounded down to powers of two; microscaling has its own rule.
    pub fn has_power_of_two_scales(&self) -> bool {
        match *self {
            Self::None | Self::Static(_) | Self::DynamicMx => false,
            Self::DynamicPerToken { power_of_two, .. }
            | Self::DynamicPerTensor { power_of_two, .. }
            | Self::DynamicPerGroup { power_of_two, .. } => power_of_two,
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
        // The weight is already cast: this quantizer is never used.
        let dequant_scale = codes.dequant_scale().clone();
        let source = ScaleSource::Fixed { dequant_scale };
        let b = Quantizer::new(Cast::new(codes.format()), codes.granularity(), source);
        let output = input
            .quantizer()
            .map(|a| GemmPlan::new(a, b).with_fast_accum(true));
        // Without a cast of inputs, rows are to be as independent of each other as those of FP8 products.
        let plan = LinearPlan::new(path)
            .with_output(output)
            .with_independent_rows(true);
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

    /// `y = x weight^T + bias`, in x's dtype. `x`: `[.., in_features]`.
    ///
    /// # Errors
    /// As [`fp8_linear`].
    pub fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        fp8_linear(x, LinearWeight::Packed(&self.weight), bias, &self.plan)
    }
}
