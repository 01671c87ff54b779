//! The schemes into which a model is quantized.

use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, ParseNameError};
use std::fmt;
use std::str::FromStr;

/// How [`quantize`](super::quantize) scales weights, and how loaders are to scale inputs.
///
/// | name | weights | inputs |
/// |---|---|---|
/// | `static-tensor` | one scale | one scale from calibration |
/// | `dynamic-tensor` | one scale | one scale from their own amax |
/// | `tensor-token` | one scale | a scale per token |
/// | `channel-token` | a scale per output feature | a scale per token |
/// | `block128` | a scale per 128x128 | a scale per 128 inputs of a token |
/// | `mxfp8` | a power of two per 32 | a power of two per 32 |
/// | `weight-only`, `weight-only:GRANULARITY` | per channel, or `tensorwise`, `rowwise`, `blockwise:128x128`, `mx` | high precision |
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::Scheme;
/// let scheme: Scheme = "channel-token".parse()?;
/// assert_eq!(scheme, Scheme::ChannelToken);
/// assert_eq!("weight-only:mx".parse::<Scheme>()?.to_string(), "weight-only:mx");
/// assert!(!scheme.needs_calibration());
/// # Ok::<(), fp8_core::ParseNameError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// One scale per weight, one static scale for its inputs.
    StaticTensor,
    /// One scale per weight, one scale per input tensor.
    DynamicTensor,
    /// One scale per weight, one per token.
    TensorToken,
    /// One scale per output feature, one per token.
    #[default]
    ChannelToken,
    /// One scale per 128x128 weights, one per 128 inputs of a token.
    Block128,
    /// One power of two per 32 weights or inputs (OCP microscaling).
    Mxfp8,
    /// Weights only.
    WeightOnly {
        /// Which weights share a scale.
        granularity: Granularity,
    },
}

impl Scheme {
    /// Whether it needs the amax of each layer's inputs.
    pub fn needs_calibration(self) -> bool {
        self == Self::StaticTensor
    }

    pub(super) fn of_layers(self) -> LayerScheme {
        let block = Granularity::Blockwise {
            rows: 128,
            cols: 128,
        };
        let (weight, input) = match self {
            Self::StaticTensor => (Granularity::Tensorwise, InputScheme::Static(())),
            Self::DynamicTensor => (Granularity::Tensorwise, InputScheme::per_tensor()),
            Self::TensorToken => (Granularity::Tensorwise, InputScheme::per_token()),
            Self::ChannelToken => (Granularity::Rowwise, InputScheme::per_token()),
            Self::Block128 => (block, InputScheme::per_group(128)),
            Self::Mxfp8 => (Granularity::Mx, InputScheme::DynamicMx),
            Self::WeightOnly { granularity } => (granularity, InputScheme::None),
        };
        LayerScheme { weight, input }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::StaticTensor => "static-tensor",
            Self::DynamicTensor => "dynamic-tensor",
            Self::TensorToken => "tensor-token",
            Self::ChannelToken => "channel-token",
            Self::Block128 => "block128",
            Self::Mxfp8 => "mxfp8",
            Self::WeightOnly { granularity } => return write!(f, "weight-only:{granularity}"),
        })
    }
}

impl FromStr for Scheme {
    type Err = ParseNameError;

    fn from_str(name: &str) -> Result<Self, ParseNameError> {
        let plain = [
            Self::StaticTensor,
            Self::DynamicTensor,
            Self::TensorToken,
            Self::ChannelToken,
            Self::Block128,
            Self::Mxfp8,
        ];
        if let Some(scheme) = plain.into_iter().find(|scheme| scheme.to_string() == name) {
            return Ok(scheme);
        }
        if name == "weight-only" {
            let granularity = Granularity::Rowwise;
            return Ok(Self::WeightOnly { granularity });
        }
        if let Some(granularity) = name.strip_prefix("weight-only:") {
            let granularity = granularity.parse()?;
            return Ok(Self::WeightOnly { granularity });
        }
        Err(ParseNameError {
            what: "scheme",
            name: name.to_string(),
            expected: "static-tensor, dynamic-tensor, tensor-token, channel-token, block128, mxfp8, weight-only or \
                 weight-only:GRANULARITY",
        })
    }
}
