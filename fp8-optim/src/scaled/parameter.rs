//! One scaled parameter with its moments.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Shape, Tensor};
use fp8_scaled::{Scale, ScaledGrads, ScaledVar};

use super::super::error::{OptimError, Result};
use super::super::host::{self, Keys, Operand, Pass, Slice};
use super::super::parameter::Parameter;
use super::super::rule::{MAX_MOMENTS, Moment, Rates};
use super::super::shared::Shared;
use super::super::state_reader::StateReader;
use super::grad::{Grad, measure};
use super::rule::{Extent, Extents, ScaledRule};

/// A scaled parameter with what an optimizer keeps of it.
pub struct ScaledParameter {
    pub(super) var: ScaledVar,
    /// None until they begin.
    moments: Option<Vec<ScaledMoment>>,
    /// The largest magnitude of the parameter's data at a version of it.
    amax: Option<(f64, u64)>,
}

/// Data of the parameter's dtype with a scale of their own.
pub struct ScaledMoment {
    data: Tensor,
    extent: Extent,
}

impl ScaledParameter {
    pub(super) fn new<R: ScaledRule>(var: ScaledVar) -> Result<Self> {
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
        let mut parameter = Self {
            var,
            moments: None,
            amax: None,
        };
        if R::MOMENT_COUNT.is_none() {
            parameter.moments = Some(parameter.zeros::<R>()?);
        }
        Ok(parameter)
    }

    fn zeros<R: ScaledRule>(&self) -> candle_core::Result<Vec<ScaledMoment>> {
        let zeros = |_| {
            Ok(ScaledMoment {
                data: self.var.data_var().zeros_like()?,
                extent: Extent::ZERO,
            })
        };
        R::SCALED_MOMENTS.iter().map(zeros).collect()
    }

    /// The largest magnitude of the data: known from the step before, unless somebody else has changed them since.
    fn amax(&self) -> candle_core::Result<f64> {
        match self.amax {
            Some((amax, version)) if version == self.var.version() => Ok(amax),
            _ => amax_of(self.var.data_var()),
        }
    }

    fn names(&self, moment: &Moment) -> (String, String) {
        let data = format!("{}.{}", self.var.name(), moment.name);
        let scale = format!("{data}.data_scale");
        (data, scale)
    }

    fn read_moment(&self, state: &mut StateReader<'_>, moment: &Moment) -> Result<ScaledMoment> {
        let (name, scale_name) = self.names(moment);
        let (dtype, shape) = (self.var.dtype(), Shape::from(self.var.dims()));
        let data = state.take(&name, dtype, &shape, moment.non_negative)?;
        let scale = state.take_unchecked(&scale_name, DType::F32, &1.into())?;
        let dequant_scale = match scale.get(0)?.to_scalar::<f32>()? {
            0.0 => Scale::ZERO,
            number => Scale::new(number).map_err(|_| OptimError::StateValue {
                name: scale_name,
                index: 0,
                value: number.into(),
                expected: "0 or a power of two from 2^-126 to 2^127, as the scale of a moment is",
            })?,
        };
        // The loaded tensor may be a variable that somebody writes to later.
        let data = data
            .detach()
            .to_device(&Device::Cpu)?
            .contiguous()?
            .copy()?;
        let amax = amax_of(&data)?;
        let extent = Extent {
            dequant_scale,
            amax,
        };
        Ok(ScaledMoment { data, extent })
    }
}

fn amax_of(data: &Tensor) -> candle_core::Result<f64> {
    Slice::with(data, None, |values| measure(values).1)
}

impl<R: ScaledRule> Parameter<R> for ScaledParameter {
    type Grads = ScaledGrads;
    type Grad = Grad;
    type Loaded = Option<Vec<ScaledMoment>>;

    const KIND: &'static str = R::SCALED_KIND;

    fn name(&self) -> &str {
        self.var.name()
    }

    fn tensor(&self) -> &Tensor {
        self.var.data_var()
    }

    fn gradient(&self, grads: &ScaledGrads, own: &HashSet<usize>) -> Result<Option<Grad>> {
        let grad = grads.get(&self.var);
        grad.map(|grad| Grad::new(&self.var, grad, own)).transpose()
    }

    fn update(
        &mut self,
        rule: &R,
        grad: &Grad,
        rates: &Rates,
        shared: &mut Shared,
    ) -> candle_core::Result<()> {
        let begins = self.moments.is_none();
        let rates = Rates { begins, ..*rates };
        let used = rule.has_moments();
        let zeros = (begins && used).then(|| self.zeros::<R>()).transpose()?;
        let moments = self.moments.as_ref().or(zeros.as_ref());
        let moments = moments.map(Vec::as_slice).unwrap_or_default();
        let mut extents = Extents {
            parameter: Extent {
                dequant_scale: self.var.scale(),
                amax: self.amax()?,
            },
            grad: grad.extent,
            moments: [Extent::ZERO; MAX_MOMENTS],
        };
        for (extent, moment) in extents.moments.iter_mut().zip(moments) {
            *extent = moment.extent;
        }
        let plan = rule.scaled_plan(&rates, extents);
        let round = shared.round.unwrap_or_default();
        let key = |tensor: usize| round.key(rates.step, rates.index, tensor as u32);
        let keys = Keys {
            parameter: key(0),
            moments: std::array::from_fn(|i| key(i + 1)),
        };
        let measured = grad.with(|grad| {
            let moments = moments.iter().map(|moment| Operand::Values(&moment.data));
            let pass = Pass {
                grad,
                moments: moments.filter(|_| used).collect(),
                master: None,
                keys,
                saturating: true,
            };
            host::run::<R>(self.var.data_var(), &pass, plan.formula)
        })??;
        // Moments that no pass has written have not begun.
        if used {
            self.moments = self.moments.take().or(zeros);
            let new = plan.moments.into_iter().zip(measured.moments);
            for (moment, (dequant_scale, amax)) in self.moments.iter_mut().flatten().zip(new) {
                let amax = amax.into();
                moment.extent = Extent {
                    dequant_scale,
                    amax,
                };
            }
        }
        self.var.changed(plan.parameter);
        self.amax = Some((measured.parameter.into(), self.var.version()));
        shared.counts.saturated += measured.saturated;
        let is_rescaled = plan.parameter != extents.parameter.dequant_scale;
        shared.counts.rescaled += u64::from(is_rescaled);
        Ok(())
    }

    fn save(&self, state: &mut HashMap<String, Tensor>) -> Result<bool> {
        for (moment, spec) in self.moments.iter().flatten().zip(R::SCALED_MOMENTS) {
            let (data, scale) = self.names(spec);
            state.insert(data, moment.data.copy()?);
            let number = moment.extent.dequant_scale.to_f32();
            state.insert(scale, Tensor::new(&[number], &Device::Cpu)?);
        }
        Ok(self.moments.is_some())
    }

    fn check(&self, state: &mut StateReader<'_>) -> Result<(Self::Loaded, bool)> {
        let has = |moment| {
            let (data, scale) = self.names(moment);
            state.has(&data) || state.has(&scale)
        };
        if R::MOMENT_COUNT.is_some() && !R::SCALED_MOMENTS.iter().any(has) {
            return Ok((None, false));
        }
        let moments = R::SCALED_MOMENTS.iter();
        let moments = moments.map(|moment| self.read_moment(state, moment));
        Ok((Some(moments.collect::<Result<_>>()?), true))
    }

    fn restore(&mut self, loaded: Self::Loaded) {
        self.moments = loaded;
    }
}
