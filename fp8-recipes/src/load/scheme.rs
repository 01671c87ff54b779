//! The one form into which every family of checkpoints is brought before a layer sees it.
//!
//! In all of them value = code * scale, codes are E4M3 `[out, in]` and scales run along `in`. What differs is which
//! elements share a scale, and what becomes of the inputs.

use candle_core::{Device, Result, Tensor};
use fp8_core::Granularity;

/// Metadata entry of a file: a JSON list of the layers whose dynamic input scales are powers of two, which no configuration
/// can say.
pub(crate) const POWER_OF_TWO_INPUTS: &str = "fp8_power_of_two_inputs";

/// What becomes of the inputs of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputScheme {
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

/// How one layer is stored and computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct LayerScheme {
    /// Which elements of the weight share a scale; None where the shape of the scales decides.
    pub(crate) weight: Option<Granularity>,
    /// What becomes of the inputs; None where the presence of an `input_scale` decides.
    pub(crate) input: Option<InputScheme>,
    /// Whether scales that are made of the inputs are powers of two.
    pub(crate) power_of_two_inputs: bool,
    /// Amaxes of inputs count at most so much.
    pub(crate) amax_bound: Option<f32>,
}

impl LayerScheme {
    /// Scales of the weight as told, and what becomes of the inputs.
    pub(crate) fn new(weight: Granularity, input: InputScheme) -> Self {
        Self {
            weight: Some(weight),
            input: Some(input),
            ..Self::default()
        }
    }

    /// As a tensor: a VarBuilder hands out nothing else.
    pub(super) fn to_tensor(self) -> Result<Tensor> {
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
    pub(super) fn from_tensor(tensor: &Tensor) -> Result<Self> {
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

/// Side of the blocks that files without a configuration have.
const BLOCK: usize = 128;

/// Which elements of an `[n, k]` weight share a scale, told by the shape of the scale tensor; None if by no rule.
pub(crate) fn granularity_by_shape(scale: &[usize], n: usize, k: usize) -> Option<Granularity> {
    let blocks = Granularity::Blockwise {
        rows: BLOCK,
        cols: BLOCK,
    };
    [Granularity::Tensorwise, Granularity::Rowwise, blocks]
        .into_iter()
        .find(|granularity| has_shape(scale, *granularity, n, k))
}

/// Whether scales of this shape are those of an `[n, k]` weight.
pub(crate) fn has_shape(scale: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
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
pub(super) fn grid(granularity: Granularity, n: usize, k: usize) -> (usize, usize) {
    match granularity {
        Granularity::Tensorwise => (1, 1),
        Granularity::Rowwise => (n, 1),
        Granularity::Blockwise { rows, cols } => (n.div_ceil(rows.max(1)), k.div_ceil(cols.max(1))),
        Granularity::Mx => (n, k.div_ceil(fp8_core::MX_BLOCK)),
    }
}

/// The shapes that [`has_shape`] takes, for messages.
pub(crate) fn shapes_text(granularity: Option<Granularity>, n: usize, k: usize) -> String {
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
