//! What the weights of a run take when they are served.

use crate::run::Run;
use anyhow::Result;
use candle_core::Tensor;
use fp8::fp8_core::{Contraction, Granularity};
use fp8::{Fp8Layer, Fp8Module, Recipe, Visitor};

impl Run {
    /// Bytes of the linear weights as they are served: codes and scales where the recipe is FP8. In training each
    /// also has its f32 master.
    pub fn served_weight_bytes(&self) -> Result<usize> {
        struct Bytes {
            total: usize,
            weight: Option<Granularity>,
        }
        impl Visitor for Bytes {
            fn layer(&mut self, linear: &dyn Fp8Layer) {
                let (out_features, in_features) = linear.features();
                self.total += match (linear.fp8_state(), self.weight) {
                    (Some(_), Some(granularity)) => {
                        let grid = granularity.grid(out_features, in_features, Contraction::Cols);
                        // Scales of 32 elements are bytes.
                        let scale = if granularity == Granularity::Mx { 1 } else { 4 };
                        out_features * in_features + grid.len() * scale
                    }
                    _ => linear.weight_bytes(),
                };
            }
            fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
        }
        let config = self.recipe.as_ref().map(Recipe::resolve).transpose()?;
        let mut bytes = Bytes {
            total: 0,
            weight: config.map(|config| config.weight.granularity),
        };
        self.model.visit(&mut bytes);
        Ok(bytes.total)
    }
}
