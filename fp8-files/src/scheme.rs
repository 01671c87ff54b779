//! The one form into which every family of checkpoints is brought before a layer sees it.
//!
//! In all of them value = code * scale, codes are E4M3 `[out, in]` and scales run along `in`. What differs is which
//! elements share a scale, and what becomes of the inputs.

use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity, MX_BLOCK, static_dequant_scale};
use std::fmt;

/// Metadata entry of a file: a JSON list of the layers whose dynamic input scales are powers of two, which no configuration
/// can say.
pub const POWER_OF_TWO_INPUTS: &str = "fp8_power_of_two_inputs";

/// What becomes of the inputs of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputScheme {
    /// They stay in high precision (weight-only).
    None,
    /// One scale, which stands in the checkpoint.
    Static,
    /// A scale for each token, from its own amax.
    PerToken,
    /// A scale for the tensor, from its own amax.
    PerTensor,
    /// A scale for each group of so many inputs of a token, from its own amax.
    PerGroup(usize),
    /// A power of two for each 32 inputs of a token (OCP microscaling).
    Mx,
}

impl InputScheme {
    /// The scaling of the inputs. `static_scale` gives the dequant_scale of a static scheme, f32 `[1]`; the other two apply to scales
    /// made of the inputs.
    pub(crate) fn scaling(
        self,
        power_of_two: bool,
        amax_bound: Option<f32>,
        static_scale: impl FnOnce() -> Result<Tensor>,
    ) -> Result<InputScaling> {
        Ok(match self {
            Self::None => InputScaling::None,
            Self::Static => InputScaling::Static(static_scale()?),
            Self::PerToken => InputScaling::DynamicPerToken {
                power_of_two,
                amax_bound,
            },
            Self::PerTensor => InputScaling::DynamicPerTensor {
                power_of_two,
                amax_bound,
            },
            Self::PerGroup(size) => InputScaling::DynamicPerGroup { size, power_of_two },
            Self::Mx => InputScaling::DynamicMx,
        })
    }
}

/// How one layer is stored and computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LayerScheme {
    /// Which elements of the weight share a scale; None where the shape of the scales decides.
    pub weight: Option<Granularity>,
    /// What becomes of the inputs; None where the presence of an `input_scale` decides.
    pub input: Option<InputScheme>,
    /// Whether scales that are made of the inputs are powers of two.
    pub power_of_two_inputs: bool,
    /// Amaxes of inputs count at most so much.
    pub amax_bound: Option<f32>,
}

impl LayerScheme {
    /// Scales of the weight as told, and what becomes of the inputs.
    pub fn new(weight: Granularity, input: InputScheme) -> Self {
        Self {
            weight: Some(weight),
            input: Some(input),
            ..Self::default()
        }
    }

    /// As a tensor: a VarBuilder hands out nothing else.
    pub(crate) fn to_tensor(self) -> candle_core::Result<Tensor> {
        let (weight, rows, cols) = match self.weight {
            None => (0, 0, 0),
            Some(Granularity::Tensorwise) => (1, 0, 0),
            Some(Granularity::Rowwise) => (2, 0, 0),
            Some(Granularity::Blockwise { rows, cols }) => (3, rows, cols),
            Some(Granularity::Mx) => (4, 0, 0),
        };
        let (input, group) = match self.input {
            None => (0, 0),
            Some(InputScheme::None) => (1, 0),
            Some(InputScheme::Static) => (2, 0),
            Some(InputScheme::PerToken) => (3, 0),
            Some(InputScheme::PerTensor) => (4, 0),
            Some(InputScheme::PerGroup(group)) => (5, group),
            Some(InputScheme::Mx) => (6, 0),
        };
        let power_of_two = usize::from(self.power_of_two_inputs);
        // No bound is the bit pattern of infinity.
        let bound = self.amax_bound.unwrap_or(f32::INFINITY).to_bits() as usize;
        let numbers = [weight, rows, cols, input, group, power_of_two, bound].map(|n| n as i64);
        Tensor::new(&numbers, &Device::Cpu)
    }

    /// The inverse of [`LayerScheme::to_tensor`].
    pub(crate) fn from_tensor(tensor: &Tensor) -> candle_core::Result<Self> {
        let numbers = tensor.to_vec1::<i64>()?;
        let &[weight, rows, cols, input, group, power_of_two, bound] = numbers.as_slice() else {
            candle_core::bail!("a layer's scheme is {numbers:?}, expected seven numbers");
        };
        let weight = match weight {
            0 => None,
            1 => Some(Granularity::Tensorwise),
            2 => Some(Granularity::Rowwise),
            3 => Some(Granularity::Blockwise {
                rows: rows as usize,
                cols: cols as usize,
            }),
            _ => Some(Granularity::Mx),
        };
        let input = match input {
            0 => None,
            1 => Some(InputScheme::None),
            2 => Some(InputScheme::Static),
            3 => Some(InputScheme::PerToken),
            4 => Some(InputScheme::PerTensor),
            5 => Some(InputScheme::PerGroup(group as usize)),
            _ => Some(InputScheme::Mx),
        };
        Ok(Self {
            weight,
            input,
            power_of_two_inputs: power_of_two != 0,
            amax_bound: Some(f32::from_bits(bound as u32)).filter(|bound| bound.is_finite()),
        })
    }
}

/// The granularity of a weight and what becomes of its inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kind {
    /// Which elements of the weight share a scale.
    pub weight: Granularity,
    /// What becomes of the inputs.
    pub input: InputScheme,
    /// Whether scales that are not static are powers of two.
    pub power_of_two: bool,
    /// The largest amax that counts for input scales (FBGEMM).
    pub amax_bound: Option<f32>,
}

impl Kind {
    /// The scheme of a weight of this granularity whose inputs are scaled so.
    pub fn of(weight: Granularity, input: &InputScaling) -> Self {
        let power_of_two = input.has_power_of_two_scales();
        let amax_bound = input.amax_bound();
        let input = match *input {
            InputScaling::None => InputScheme::None,
            InputScaling::Static(_) => InputScheme::Static,
            InputScaling::DynamicPerToken { .. } => InputScheme::PerToken,
            InputScaling::DynamicPerTensor { .. } => InputScheme::PerTensor,
            InputScaling::DynamicPerGroup { size, .. } => InputScheme::PerGroup(size),
            InputScaling::DynamicMx => InputScheme::Mx,
        };
        Self {
            weight,
            input,
            power_of_two,
            amax_bound,
        }
    }

    /// The same weights and inputs, whose scales, where they are made of inputs, are exact.
    pub fn with_exact_inputs(self) -> Self {
        Self {
            power_of_two: false,
            ..self
        }
    }

    /// Whether loaders have to be told that input scales are powers of two.
    pub fn has_power_of_two_inputs(&self) -> bool {
        let made_while_running = matches!(
            self.input,
            InputScheme::PerToken | InputScheme::PerTensor | InputScheme::PerGroup(_)
        );
        self.power_of_two && made_while_running
    }

    /// The size of the groups of inputs, where it does not divide the input features.
    fn ragged_group(&self, (_, k): (usize, usize)) -> Option<usize> {
        let size = match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => MX_BLOCK,
            (_, InputScheme::PerGroup(size)) => size,
            _ => return None,
        };
        (!k.is_multiple_of(size.max(1))).then_some(size)
    }

    /// Whether the input features of a layer of these sizes (output and input features) do not divide into whole groups.
    pub fn is_ragged(&self, sizes: (usize, usize)) -> bool {
        self.ragged_group(sizes).is_some()
    }

    /// Whether a weight of these sizes can be cut into its blocks and groups. `way_out` says what can be done where it cannot.
    pub fn check(&self, sizes: (usize, usize), path: &str, way_out: &str) -> Result<()> {
        match (self.weight, self.input) {
            (Granularity::Mx, InputScheme::Mx | InputScheme::None) => {}
            (Granularity::Mx, _) | (_, InputScheme::Mx) => {
                let reason = "microscaled weights go with microscaled inputs only";
                return Err(refused(path, reason.into()));
            }
            _ => {}
        }
        let Some(size) = self.ragged_group(sizes) else {
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
    pub fn quantize(
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
    pub fn input_scale(&self, amax: f32, device: &Device, path: &str) -> Result<Tensor> {
        static_scale(amax, device, path, "input")
    }

    /// What a configuration says of it, powers of two apart.
    pub(crate) fn group(&self) -> (Granularity, InputScheme) {
        (self.weight, self.input)
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} weights with ", self.weight)?;
        match self.input {
            InputScheme::None => f.write_str("inputs in high precision"),
            InputScheme::Static => f.write_str("static input scales"),
            InputScheme::PerToken => f.write_str("inputs scaled per token"),
            InputScheme::PerTensor => f.write_str("inputs scaled per tensor"),
            InputScheme::PerGroup(size) => write!(f, "inputs scaled per group of {size}"),
            InputScheme::Mx => f.write_str("microscaled inputs"),
        }?;
        if self.has_power_of_two_inputs() {
            f.write_str(", input scales powers of two")?;
        }
        match self.amax_bound {
            Some(bound) => write!(f, ", whose amax counts up to {bound}"),
            None => Ok(()),
        }
    }
}

/// Side of the blocks that files without a configuration have.
const BLOCK: usize = 128;

/// Which elements of an `[n, k]` weight share a scale, told by the shape of the scale tensor; None if by no rule.
pub fn granularity_by_shape(scale: &[usize], n: usize, k: usize) -> Option<Granularity> {
    let blocks = Granularity::Blockwise {
        rows: BLOCK,
        cols: BLOCK,
    };
    [Granularity::Tensorwise, Granularity::Rowwise, blocks]
        .into_iter()
        .find(|granularity| has_shape(scale, *granularity, n, k))
}

/// Whether scales of this shape are those of an `[n, k]` weight.
pub fn has_shape(scale: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
    match (granularity, scale) {
        (Granularity::Tensorwise, [] | [1] | [1, 1]) => true,
        (Granularity::Rowwise, [rows] | [rows, 1]) => *rows == n,
        // A weight of one block may have its scale as a number.
        (Granularity::Blockwise { .. }, [] | [1]) => grid(granularity, n, k) == (1, 1),
        (Granularity::Blockwise { .. } | Granularity::Mx, [r, c])
        | (Granularity::Blockwise { .. }, [r, 1, c, 1]) => grid(granularity, n, k) == (*r, *c),
        // Blocks along the rows only.
        (Granularity::Blockwise { rows: 1, .. }, [r, c, 1]) => grid(granularity, n, k) == (*r, *c),
        _ => false,
    }
}

/// Rows and columns of scales of an `[n, k]` weight.
pub(crate) fn grid(granularity: Granularity, n: usize, k: usize) -> (usize, usize) {
    match granularity {
        Granularity::Tensorwise => (1, 1),
        Granularity::Rowwise => (n, 1),
        Granularity::Blockwise { rows, cols } => (n.div_ceil(rows.max(1)), k.div_ceil(cols.max(1))),
        Granularity::Mx => (n, k.div_ceil(fp8_core::MX_BLOCK)),
    }
}

/// The shapes that [`has_shape`] takes, for messages.
pub fn shapes_text(granularity: Option<Granularity>, n: usize, k: usize) -> String {
    let blocks = |rows: usize, cols: usize| {
        let (r, c) = (n.div_ceil(rows.max(1)), k.div_ceil(cols.max(1)));
        format!("[{r}, {c}] for blocks of {rows}x{cols}")
    };
    let shapes = match granularity {
        None => format!("[1], [{n}, 1] or {}", blocks(BLOCK, BLOCK)),
        Some(Granularity::Tensorwise) => "[1]".into(),
        Some(Granularity::Rowwise) => format!("[{n}, 1]"),
        Some(Granularity::Blockwise { rows, cols }) => blocks(rows, cols),
        Some(Granularity::Mx) => blocks(1, fp8_core::MX_BLOCK),
    };
    format!("{shapes} for a weight of [{n}, {k}]")
}
