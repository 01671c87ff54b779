//! One variable with its moments.

use super::super::OptimError;
use super::super::error::Result;
use super::super::masters::HostMaster;
use super::RoundTo;
use super::size::value;
use super::value::{amax_of, zeros};
use candle_core::DType;
use fp8_core::StochasticKey;
use fp8_scaled::{Scale, ScaledVar};

/// Keeps the bits apart from those of casts that are given the same seed.
const DOMAIN: u64 = 0x7363_616C_6564_6F70;

/// How the tensors of one variable are rounded in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounded {
    pub(super) to: RoundTo,
    pub(super) step: u64,
    /// Number of the variable.
    pub(super) id: u32,
}

impl Rounded {
    /// The bits for the parameter, 0, or a moment.
    pub(super) fn key(self, tensor: u32) -> Option<StochasticKey> {
        match self.to {
            RoundTo::Nearest => None,
            RoundTo::Stochastic { seed } => Some(StochasticKey {
                seed: seed ^ DOMAIN,
                step: self.step as u32,
                tensor: 4 * self.id + tensor,
            }),
        }
    }
}

/// A running mean: data of the variable's dtype, a scale of their own.
pub(super) struct Moment {
    pub(super) values: HostMaster,
    pub(super) scale: Scale,
    /// Largest magnitude of the data.
    pub(super) amax: f32,
}

impl Moment {
    pub(super) fn zeros(var: &ScaledVar) -> Self {
        Self {
            values: zeros(var.dtype(), var.dims().iter().product()),
            scale: Scale::ZERO,
            amax: 0.0,
        }
    }

    /// The largest magnitude of the values.
    pub(super) fn size(&self) -> f64 {
        f64::from(self.amax) * value(self.scale)
    }
}

pub(super) struct Slot<const N: usize> {
    pub(super) var: ScaledVar,
    pub(super) decays: bool,
    /// None until the first gradient, which tells SGD that its buffer begins.
    pub(super) moments: Option<[Moment; N]>,
    /// Largest magnitude of the variable's data at a version of it.
    amax: Option<(f32, u64)>,
}

impl<const N: usize> Slot<N> {
    pub(super) fn new(var: ScaledVar, decays: bool) -> Result<Self> {
        let name = || var.name().to_string();
        if !matches!(var.dtype(), DType::F16 | DType::BF16 | DType::F32) {
            return Err(OptimError::ScaledDtype {
                name: name(),
                got: var.dtype(),
            });
        }
        if !var.device().is_cpu() {
            return Err(OptimError::ScaledDevice {
                name: name(),
                got: var.device().location(),
            });
        }
        Ok(Self {
            var,
            decays,
            moments: None,
            amax: None,
        })
    }

    /// The largest magnitude of the variable's data. Known from the step before, unless somebody else has changed them since.
    pub(super) fn amax(&self) -> candle_core::Result<f32> {
        match self.amax {
            Some((amax, version)) if version == self.var.version() => Ok(amax),
            _ => amax_of(self.var.data_var().as_tensor()),
        }
    }

    /// Announces new data.
    pub(super) fn changed(&mut self, scale: Scale, amax: f32) {
        self.var.changed(scale);
        self.amax = Some((amax, self.var.version()));
    }
}
