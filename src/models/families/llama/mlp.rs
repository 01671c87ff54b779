//! The gated MLP of a layer or an expert.

use super::joint::Joint;
use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{VarBuilder, linear_b};
use candle_core::{Module, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// Names of gate, up and down in the file.
pub(super) type Names = [&'static str; 3];

pub(super) const NAMES: Names = ["gate_proj", "up_proj", "down_proj"];

#[derive(Debug, Clone, Fp8Module)]
pub(super) struct Mlp {
    gate_up: Joint,
    down: Projection,
}

impl Mlp {
    pub(super) fn new(
        (hidden, intermediate): (usize, usize),
        bias: bool,
        [gate, up, down]: Names,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let parts = [(gate, intermediate), (up, intermediate)];
        Ok(Self {
            gate_up: Joint::new(hidden, &parts, "gate_up_proj", bias, &vb)?,
            down: linear_b(intermediate, hidden, bias, vb.pp(down))?.into(),
        })
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        self.gate_up.projections().chain([&mut self.down])
    }

    /// What writes the output.
    pub(super) fn output(&mut self) -> &mut Projection {
        &mut self.down
    }

    /// What reads the input.
    pub(super) fn readers(&mut self) -> impl Iterator<Item = &mut Projection> {
        self.gate_up.projections()
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.gate_up.forward::<2>(x)?;
        Ok(self.down.forward(&ops::swiglu(&gate, &up)?)?)
    }
}
