//! Linear layers that read the same input, stored separately or fused.

use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{VarBuilder, linear_b};
use candle_core::{D, Module, Tensor};
use fp8_recipes::Fp8Module;

/// Several projections of one input.
#[derive(Debug, Clone, Fp8Module)]
pub(super) enum Joint {
    /// One layer per projection.
    Apart(Vec<Projection>),
    /// One layer whose outputs are concatenated.
    Fused {
        layer: Projection,
        #[fp8(skip)]
        sizes: Vec<usize>,
    },
}

impl Joint {
    /// Loads the layers `parts` (name, outputs) from `vb`, or the fused one named `fused` if the file has it instead.
    pub(super) fn new(
        inputs: usize,
        parts: &[(&str, usize)],
        fused: &str,
        bias: bool,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let first = parts.first().map_or("", |(name, _)| name);
        let has = |name: &str| vb.pp(name).contains_tensor("weight");
        if has(fused) && !has(first) {
            let sizes: Vec<usize> = parts.iter().map(|(_, outputs)| *outputs).collect();
            let layer = linear_b(inputs, sizes.iter().sum(), bias, vb.pp(fused))?;
            return Ok(Self::Fused {
                layer: layer.into(),
                sizes,
            });
        }
        let parts = parts.iter();
        let layers = parts.map(|(name, outputs)| {
            let layer = linear_b(inputs, *outputs, bias, vb.pp(name))?;
            Ok(Projection::from(layer))
        });
        Ok(Self::Apart(layers.collect::<Result<_>>()?))
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        match self {
            Self::Apart(layers) => layers.iter_mut(),
            Self::Fused { layer, .. } => std::slice::from_mut(layer).iter_mut(),
        }
    }

    /// The outputs of all parts.
    pub(super) fn forward<const N: usize>(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let outputs: Vec<Tensor> = match self {
            Self::Apart(layers) => Projection::forward_joint(layers, x)?,
            Self::Fused { layer, sizes } => {
                let y = layer.forward(x)?;
                let mut from = 0;
                let parts = sizes.iter().map(|size| {
                    from += size;
                    y.narrow(D::Minus1, from - size, *size)?.contiguous()
                });
                parts.collect::<candle_core::Result<_>>()?
            }
        };
        let count = outputs.len();
        outputs.try_into().map_err(|_| {
            candle_core::Error::msg(format!("{count} projections, expected {N}")).into()
        })
    }
}
