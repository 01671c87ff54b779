//! Which activations there are: names, and which function each applies to what.

use std::fmt;
use std::str::FromStr;

/// The nonlinearity between the two projections of a feed-forward network.
///
/// The gated ones read twice as many features, the gate before the value: `f(x[.., ..n]) * x[.., n..]`.
///
/// ```
/// use fp8_candle::ops::Activation;
/// assert!(Activation::SwiGlu.is_gated() && !Activation::Gelu.is_gated());
/// assert_eq!("swiglu".parse(), Ok(Activation::SwiGlu)); // Transformer Engine's names
/// assert_eq!(Activation::SquaredRelu.to_string(), "srelu");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// GELU, tanh approximation; candle_nn's `NewGelu`.
    #[default]
    Gelu,
    /// GELU by the error function, `x (1 + erf(x / sqrt 2)) / 2`; candle_nn's `Gelu`, and `gelu` of Hugging Face's configurations.
    GeluErf,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
    /// `x sigmoid(x)`.
    Silu,
    /// `sigmoid(gate) value`.
    Glu,
    /// `gelu(gate) value`, tanh approximation.
    GeGlu,
    /// `gelu_erf(gate) value`.
    GeGluErf,
    /// `quick_gelu(gate) value`.
    QuickGeGlu,
    /// `max(gate, 0) value`.
    ReGlu,
    /// `max(gate, 0)^2 value`.
    SquaredReGlu,
    /// `silu(gate) value`.
    SwiGlu,
}

/// All activations by Transformer Engine's names, and the two that it does not have.
const NAMES: [(Activation, &str); 13] = [
    (Activation::Gelu, "gelu"),
    (Activation::GeluErf, "gelu_erf"),
    (Activation::QuickGelu, "qgelu"),
    (Activation::Relu, "relu"),
    (Activation::SquaredRelu, "srelu"),
    (Activation::Silu, "silu"),
    (Activation::Glu, "glu"),
    (Activation::GeGlu, "geglu"),
    (Activation::GeGluErf, "geglu_erf"),
    (Activation::QuickGeGlu, "qgeglu"),
    (Activation::ReGlu, "reglu"),
    (Activation::SquaredReGlu, "sreglu"),
    (Activation::SwiGlu, "swiglu"),
];

/// The function of one number behind an activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Curve {
    Gelu,
    GeluErf,
    QuickGelu,
    Relu,
    SquaredRelu,
    Silu,
    Sigmoid,
}

impl Activation {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(activation, _)| activation)
    }

    /// Whether it reads twice as many features as it gives.
    pub fn is_gated(self) -> bool {
        matches!(
            self,
            Self::Glu
                | Self::GeGlu
                | Self::GeGluErf
                | Self::QuickGeGlu
                | Self::ReGlu
                | Self::SquaredReGlu
                | Self::SwiGlu
        )
    }

    /// The number of its function in kernels.
    #[cfg(feature = "cuda")]
    pub(crate) fn curve_id(self) -> u32 {
        match self.curve() {
            Curve::Gelu => 0,
            Curve::QuickGelu => 1,
            Curve::Relu => 2,
            Curve::SquaredRelu => 3,
            Curve::Silu => 4,
            Curve::Sigmoid => 5,
            Curve::GeluErf => 6,
        }
    }

    /// The function of its gate, or of its only input.
    pub(crate) fn curve(self) -> Curve {
        match self {
            Self::Gelu | Self::GeGlu => Curve::Gelu,
            Self::GeluErf | Self::GeGluErf => Curve::GeluErf,
            Self::QuickGelu | Self::QuickGeGlu => Curve::QuickGelu,
            Self::Relu | Self::ReGlu => Curve::Relu,
            Self::SquaredRelu | Self::SquaredReGlu => Curve::SquaredRelu,
            Self::Silu | Self::SwiGlu => Curve::Silu,
            Self::Glu => Curve::Sigmoid,
        }
    }

    /// The name by which it is parsed, which errors and nodes have too.
    pub fn name(self) -> &'static str {
        let found = NAMES.iter().find(|(activation, _)| *activation == self);
        found.map_or("activation", |(_, name)| name)
    }

    /// The shape of the result for an input of shape `dims`.
    pub(crate) fn result_dims(self, dims: &[usize]) -> Vec<usize> {
        let mut dims = dims.to_vec();
        if let (true, Some(dim)) = (self.is_gated(), dims.last_mut()) {
            *dim /= 2;
        }
        dims
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activation {
    type Err = UnknownActivation;

    fn from_str(text: &str) -> Result<Self, UnknownActivation> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        let unknown = || UnknownActivation(text.to_string());
        found.map(|(activation, _)| *activation).ok_or_else(unknown)
    }
}

/// Unknown activation name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no activation `{0}`: gelu, gelu_erf, qgelu, relu, srelu, silu, glu, geglu, geglu_erf, qgeglu, reglu, sreglu or swiglu"
)]
pub struct UnknownActivation(pub String);
