//! One scaled parameter with its moments.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Shape, Tensor};
use fp8_scaled::{Scale, ScaledGrads, ScaledVar};

use super::super::error::{OptimError, Result};
use super::super::host::{self, HostValues, Keys, Pass, amax_of_tensor};
use super::super::parameter::Parameter;
use super::super::rounding::RoundTo;
use super::super::rule::{MAX_MOMENTS, Moment, Rates};
use super::super::state_reader::StateReader;
use super::grad::Grad;
use super::rule::{Extent, Extents, ScaledRule};

/// What the steps of an optimizer have done to data and scales since it was made or loaded.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8::optim::SgdConfig;
/// use fp8::optim::scaled::{ScaledOptimizer, ScaledSgd};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Data of 2^12 are beyond the window of parameters.
/// let w = ScaledVar::new("w", &Tensor::full(4096f32, 4, &Device::Cpu)?.to_dtype(DType::F16)?)?;
/// let mut sgd = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
/// sgd.apply(&w.value().sum_all()?.backward()?)?;
/// assert_eq!((sgd.counts().rescaled, sgd.counts().saturated), (1, 0));
/// assert!(w.scale().to_f32() > 1.);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScaledCounts {
    /// Elements of parameters and moments that were beyond the range of their dtype and became its largest number.
    pub saturated: u64,
    /// How often a parameter got another scale.
    pub rescaled: u64,
}

/// What the scaled parameters of an optimizer share.
#[derive(Default)]
pub struct Shared {
    pub(super) round: RoundTo,
    pub(super) counts: ScaledCounts,
}

/// A scaled parameter with what an optimizer keeps of it.
pub struct ScaledParameter {
    pub(super) var: ScaledVar,
    /// None until they begin.
    moments: Option<Vec<ScaledMoment>>,
    /// The largest magnitude of the parameter's data at a version of it.
    amax: Option<(f32, u64)>,
}

/// Data of the parameter's dtype with a scale of their own.
pub struct ScaledMoment {
    values: HostValues,
    scale: Scale,
    /// The largest magnitude of the data.
    amax: f32,
}

impl ScaledMoment {
    fn zeros(var: &ScaledVar) -> Self {
        Self {
            values: HostValues::zeros(var.dtype(), var.dims().iter().product()),
            scale: Scale::ZERO,
            amax: 0.0,
        }
    }

    fn extent(&self) -> Extent {
        Extent {
            dequant_scale: self.scale,
            amax: self.amax.into(),
        }
    }
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
            parameter.moments = Some(parameter.zeros::<R>());
        }
        Ok(parameter)
    }

    fn zeros<R: ScaledRule>(&self) -> Vec<ScaledMoment> {
        let zeros = R::SCALED_MOMENTS
            .iter()
            .map(|_| ScaledMoment::zeros(&self.var));
        zeros.collect()
    }

    /// The largest magnitude of the data: known from the step before, unless somebody else has changed them since.
    fn amax(&self) -> candle_core::Result<f32> {
        match self.amax {
            Some((amax, version)) if version == self.var.version() => Ok(amax),
            _ => amax_of_tensor(self.var.data_var()),
        }
    }

    fn names(&self, moment: &Moment) -> (String, String) {
        let data = format!("{}.{}", self.var.name(), moment.name);
        let scale = format!("{data}.data_scale");
        (data, scale)
    }
}

fn read_moment(
    var: &ScaledVar,
    state: &mut StateReader<'_>,
    data: &str,
    scale_name: &str,
    non_negative: bool,
) -> Result<ScaledMoment> {
    let shape = Shape::from(var.dims());
    let values = state.take(data, var.dtype(), &shape, non_negative)?;
    let scale = state.take_unchecked(scale_name, DType::F32, &1.into())?;
    let number = scale.flatten_all()?.to_vec1::<f32>()?;
    let number = number.first().copied().unwrap_or(f32::NAN);
    let scale = match number {
        0.0 => Scale::ZERO,
        number => Scale::new(number).map_err(|_| OptimError::StateValue {
            name: scale_name.to_string(),
            index: 0,
            value: number.into(),
            expected: "0 or a power of two from 2^-126 to 2^127, as the scale of a moment is",
        })?,
    };
    let values = HostValues::from_tensor(values)?;
    Ok(ScaledMoment {
        amax: values.amax(),
        values,
        scale,
    })
}

impl<R: ScaledRule> Parameter<R> for ScaledParameter {
    type Grads = ScaledGrads;
    type Grad = Grad;
    type Loaded = Option<Vec<ScaledMoment>>;
    type Shared = Shared;

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
        let parameter = Extent {
            dequant_scale: self.var.scale(),
            amax: self.amax()?.into(),
        };
        let mut moments = self.moments.take().unwrap_or_else(|| self.zeros::<R>());
        let mut extents = [Extent {
            dequant_scale: Scale::ZERO,
            amax: 0.0,
        }; MAX_MOMENTS];
        for (extent, moment) in extents.iter_mut().zip(&moments) {
            *extent = moment.extent();
        }
        let extents = Extents {
            parameter,
            grad: grad.extent,
            moments: extents,
        };
        let plan = rule.scaled_plan(&rates, extents);
        let used = rule.has_moments();
        let mut values = moments.iter_mut().map(|moment| &mut moment.values);
        let values: [_; MAX_MOMENTS] = std::array::from_fn(|_| values.next().filter(|_| used));
        let key = |tensor: usize| shared.round.key(rates.step, rates.index, tensor as u32);
        let keys = Keys {
            parameter: key(0),
            moments: std::array::from_fn(|i| key(i + 1)),
        };
        let var = self.var.data_var();
        let measured = grad.with(|grad| {
            let pass = Pass {
                grad,
                moments: values,
                master: None,
                keys,
                saturating: true,
            };
            host::run::<R>(var, pass, plan.formula)
        });
        let measured = measured.and_then(|measured| measured);
        if let (Ok(measured), true) = (&measured, used) {
            for (i, moment) in moments.iter_mut().enumerate() {
                (moment.scale, moment.amax) = (plan.moments[i], measured.moments[i]);
            }
        }
        // A moment that no pass has written has not begun.
        if !begins || (used && measured.is_ok()) {
            self.moments = Some(moments);
        }
        let measured = measured?;
        self.var.changed(plan.parameter);
        self.amax = Some((measured.parameter, self.var.version()));
        shared.counts.saturated += measured.saturated;
        shared.counts.rescaled += u64::from(plan.parameter != parameter.dequant_scale);
        Ok(())
    }

    fn save(&self, state: &mut HashMap<String, Tensor>) -> Result<bool> {
        let shape = Shape::from(self.var.dims());
        for (moment, spec) in self.moments.iter().flatten().zip(R::SCALED_MOMENTS) {
            let (data, scale) = self.names(spec);
            state.insert(data, moment.values.to_tensor(&shape)?);
            let number = Tensor::new(&[moment.scale.to_f32()], &Device::Cpu)?;
            state.insert(scale, number);
        }
        Ok(self.moments.is_some())
    }

    fn check(&self, state: &mut StateReader<'_>) -> Result<Self::Loaded> {
        let names = R::SCALED_MOMENTS.iter().map(|moment| self.names(moment));
        let names: Vec<(String, String)> = names.collect();
        let has = |(data, scale): &(String, String)| state.has(data) || state.has(scale);
        if R::MOMENT_COUNT.is_some() && !names.iter().any(has) {
            return Ok(None);
        }
        let mut moments = vec![];
        for ((data, scale), moment) in names.iter().zip(R::SCALED_MOMENTS) {
            moments.push(read_moment(
                &self.var,
                state,
                data,
                scale,
                moment.non_negative,
            )?);
        }
        Ok(Some(moments))
    }

    fn has_moments(loaded: &Self::Loaded) -> bool {
        loaded.is_some()
    }

    fn restore(&mut self, loaded: Self::Loaded) {
        self.moments = loaded;
    }

    fn invalidate(_: &mut Shared) {}

    fn restored(shared: &mut Shared) {
        shared.counts = ScaledCounts::default();
    }

    fn rounding(shared: &Shared) -> Option<RoundTo> {
        Some(shared.round)
    }

    fn set_rounding(shared: &mut Shared, round: RoundTo) {
        shared.round = round;
    }
}
