//! One variable with its moments and its master.

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use fp8_candle::weight_version::WeightVersion;

use super::super::error;
use super::super::gradients::own_gradient;
use super::super::host::{self, Keys, Operand, Pass, Slice};
use super::super::masters::Keeping;
use super::super::moments::{Kept, MomentStorage, Random, coding};
use super::super::parameter::Parameter;
use super::super::rounding::RoundTo;
use super::super::rule::{Rates, Rule};
use super::super::settings::Settings;
use super::super::shared::Shared;
use super::super::state_reader::StateReader;
use super::composed;

/// A variable of candle with what an optimizer keeps of it.
pub struct Variable {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) keeping: Keeping,
    pub(super) storage: MomentStorage,
    pub(super) state: State,
    /// Whether updates run over host memory in place: of contiguous f32, bf16 and f16 variables on the CPU. Otherwise each step replaces
    /// moments and master, or kernels of a CUDA device update them in place.
    in_place: bool,
    /// Tells layers that keep FP8 copies of the variable when it changes.
    pub(super) version: WeightVersion,
    /// A tensor of the shape of the whole parameter, if the variable is a range of it.
    whole: Option<Tensor>,
}

/// What belongs to the optimizer, on the variable's device.
pub struct State {
    /// None until they begin.
    pub(super) moments: Option<Vec<Kept>>,
    pub(super) master: Option<Tensor>,
}

impl Variable {
    pub(crate) fn new<R: Rule>(name: String, var: Var, settings: &Settings) -> error::Result<Self> {
        let keeping = Keeping::of(&var, settings.masters);
        let on_host = matches!(var.device(), Device::Cpu) && var.dtype() != DType::F64;
        let mut variable = Self {
            version: WeightVersion::of(&var),
            keeping,
            storage: settings.moments,
            in_place: on_host && var.is_contiguous(),
            state: State {
                moments: None,
                master: keeping.new_copy(&name, &var)?,
            },
            name,
            var,
            whole: None,
        };
        if R::MOMENT_COUNT.is_none() {
            variable.state.moments = Some(variable.zeros::<R>()?);
        }
        Ok(variable)
    }

    /// The same variable as a range of a parameter of the shape of `whole`.
    pub(crate) fn with_whole(self, whole: Tensor) -> Self {
        let whole = Some(whole);
        Self { whole, ..self }
    }

    /// Moments of zeros.
    fn zeros<R: Rule>(&self) -> Result<Vec<Kept>> {
        let (shape, dtype) = (self.var.shape(), self.moment_dtype());
        let zeros = || Kept::zeros(self.storage, shape, dtype, self.var.device());
        R::MOMENTS.iter().map(|_| zeros()).collect()
    }

    /// Whether it is a range of a parameter.
    pub(super) fn is_part(&self) -> bool {
        self.whole.is_some()
    }

    /// The moments, stored in another way.
    pub(super) fn moments_as<R: Rule>(&self, storage: MomentStorage) -> Result<Option<Vec<Kept>>> {
        let stored = self.state.moments.as_ref().map(|moments| {
            let pairs = moments.iter().zip(R::MOMENTS);
            let stored =
                pairs.map(|(kept, moment)| kept.stored(storage, moment, self.var.device()));
            stored.collect()
        });
        stored.transpose()
    }

    /// Bytes of moments and master.
    pub(super) fn state_bytes(&self) -> u64 {
        let master = self.state.master.as_ref();
        let master = master.map_or(0, |m| m.elem_count() * m.dtype().size_in_bytes());
        let moments = self.state.moments.iter().flatten().map(Kept::bytes);
        moments.sum::<u64>() + master as u64
    }

    /// f64 for an f64 variable, f32 for all others: in bf16 a second moment would never move, since `1 - beta2` is below half a unit in
    /// the last place.
    fn moment_dtype(&self) -> DType {
        match self.var.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The name of a moment or master in a state.
    fn state_name(&self, part: &str) -> String {
        format!("{}.{part}", self.name)
    }
}

/// The random bits of moment number `i` of variable number `index`.
pub(super) fn moment_random(seed: u64, step: u64, index: usize, i: usize) -> Option<Random> {
    let key = RoundTo::Stochastic { seed }.key(step, index, 1)?;
    Some(Random::of(key, i))
}

impl<R: Rule> Parameter<R> for Variable {
    type Grads = GradStore;
    type Grad = Tensor;
    type Loaded = State;

    const KIND: &'static str = R::KIND;

    fn name(&self) -> &str {
        &self.name
    }

    fn tensor(&self) -> &Tensor {
        &self.var
    }

    fn whole(&self) -> &Tensor {
        self.whole.as_ref().unwrap_or(&self.var)
    }

    /// A gradient has the variable's dtype, or f32 for a bf16 or f16 variable.
    fn gradient(&self, grads: &GradStore, own: &HashSet<usize>) -> error::Result<Option<Tensor>> {
        let Some(grad) = grads.get(&self.var) else {
            return Ok(None);
        };
        let (dtype, got) = (self.var.dtype(), grad.dtype());
        let is_wide = got == DType::F32 && matches!(dtype, DType::BF16 | DType::F16);
        let fits = is_wide || got == dtype;
        own_gradient(&self.name, &self.var, grad, grad.dims(), fits, own).map(Some)
    }

    fn update(&mut self, rule: &R, grad: &Tensor, rates: &Rates, _: &mut Shared) -> Result<()> {
        if self.var.elem_count() == 0 {
            // candle's operations return an empty tensor as it is, and a variable cannot be set to itself.
            if rule.has_moments() && self.state.moments.is_none() {
                self.state.moments = Some(self.zeros::<R>()?);
            }
            return Ok(());
        }
        let begins = self.state.moments.is_none();
        let rates = &Rates { begins, ..*rates };
        let key = (self.keeping).key(rule.settings().seed, rates.step, rates.index as u32);
        let used = rule.has_moments();
        let zeros = (used && begins).then(|| self.zeros::<R>()).transpose()?;
        let moments = self.state.moments.as_ref().or(zeros.as_ref());
        let moments = moments.into_iter().flatten().filter(|_| used);
        let seed = rule.settings().seed;
        let random = |i: usize| moment_random(seed, rates.step, rates.index, i);
        if self.in_place {
            let (formula, clip) = (rule.formula::<f32>(rates), rates.clip as f32);
            let pairs = moments.zip(R::MOMENTS).enumerate();
            let operands = pairs.map(|(i, (kept, moment))| match kept {
                Kept::Values(values) => Operand::Values(values),
                Kept::Coded(coded) => {
                    let coding = coding(self.storage, moment, random(i));
                    Operand::Coded(coded, coding.unwrap_or_default())
                }
            });
            let operands = operands.collect();
            Slice::with(grad, None, |grad| {
                let keys = Keys {
                    parameter: key,
                    ..Keys::default()
                };
                let pass = Pass {
                    grad,
                    moments: operands,
                    master: self.state.master.as_ref(),
                    keys,
                    saturating: false,
                };
                host::run::<R>(
                    &self.var,
                    &pass,
                    #[inline(always)]
                    move |theta, grad, moments: &mut [f32]| formula(theta, grad * clip, moments),
                )
            })??;
            // Moments that no pass has written have not begun.
            self.state.moments = self.state.moments.take().or(zeros);
        } else {
            let grad = composed::clipped(grad, self.moment_dtype(), rates.clip)?;
            let moments = moments.map(|kept| kept.values(self.var.device()));
            let moments = moments.collect::<Result<_>>()?;
            let (master, formula) = (&mut self.state.master, rule.formula(rates));
            let new = composed::update(&self.var, grad, moments, master, key, formula)?;
            if used {
                let new = new.into_iter().zip(R::MOMENTS).enumerate();
                let kept = new
                    .map(|(i, (values, moment))| Kept::of(values, self.storage, moment, random(i)));
                self.state.moments = Some(kept.collect::<Result<_>>()?);
            }
        }
        Ok(())
    }

    fn save(&self, state: &mut HashMap<String, Tensor>) -> error::Result<bool> {
        for (moment, kept) in R::MOMENTS.iter().zip(self.state.moments.iter().flatten()) {
            kept.save(&self.state_name(moment.name), state)?;
        }
        if let Some(master) = &self.state.master {
            state.insert(self.state_name(MASTER), master.copy()?);
        }
        Ok(self.state.moments.is_some())
    }

    fn check(&self, state: &mut StateReader<'_>) -> error::Result<(State, bool)> {
        let shape: &Shape = self.var.shape();
        // The loaded tensor may be a variable that somebody writes to later.
        let copy = |tensor: &Tensor| -> error::Result<Tensor> {
            let tensor = tensor.detach().to_device(self.var.device())?;
            Ok(tensor.contiguous()?.copy()?)
        };
        let mut names = R::MOMENTS.iter().map(|moment| self.state_name(moment.name));
        let begun = R::MOMENT_COUNT.is_none() || names.any(|name| state.has(&name));
        let mut moments = vec![];
        for moment in R::MOMENTS.iter().filter(|_| begun) {
            let (name, form) = (self.state_name(moment.name), (shape, self.moment_dtype()));
            let device = self.var.device();
            let kept = Kept::read(state, &name, moment, form, device)?;
            moments.push(kept.stored(self.storage, moment, device)?);
        }
        let master = self.keeping.copy_dtype();
        let master =
            master.map(|dtype| copy(state.take(&self.state_name(MASTER), dtype, shape, false)?));
        let loaded = State {
            moments: begun.then_some(moments),
            master: master.transpose()?,
        };
        Ok((loaded, begun))
    }

    fn restore(&mut self, loaded: State) {
        self.state = loaded;
    }
}

const MASTER: &str = "master_param";

#[cfg(test)]
mod tests {
    use super::super::super::adamw::AdamWConfig;
    use super::super::super::masters::MasterDType;
    use super::super::super::moments::Fp8Moments;
    use super::super::super::sgd::SgdConfig;
    use super::*;

    type Bits = Vec<f32>;

    fn bits(t: &Tensor) -> Result<Bits> {
        t.to_dtype(DType::F32)?.to_vec1()
    }

    fn all_bits(variable: &Variable) -> Result<(Bits, Option<Vec<Bits>>, Option<Bits>)> {
        let State { moments, master } = &variable.state;
        let value = |kept: &Kept| bits(&kept.values(&Device::Cpu)?);
        let moments = moments.as_ref().map(|all| all.iter().map(value).collect());
        Ok((
            bits(&variable.var)?,
            moments.transpose()?,
            master.as_ref().map(bits).transpose()?,
        ))
    }

    /// Devices without loops of their own take the composed update; here it is held against the one in place.
    fn composed_equals_in_place<R: Rule>(rule: R) -> error::Result<()> {
        let (wide, half, brain) = (MasterDType::F32, MasterDType::F16, MasterDType::Bf16);
        for (dtype, masters) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::F16, None),
            (DType::BF16, Some(wide)),
            (DType::F16, Some(wide)),
            (DType::F32, Some(half)),
            (DType::F32, Some(brain)),
            (DType::BF16, Some(half)),
            (DType::F16, Some(brain)),
            (DType::F16, Some(half)),
        ] {
            // Several tasks.
            let values: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
            let start = Tensor::from_vec(values, 40_000, &Device::Cpu)?.to_dtype(dtype)?;
            let new = || {
                let var = Var::from_tensor(&start.copy()?)?;
                let settings = Settings {
                    masters,
                    ..rule.settings()
                };
                Variable::new::<R>("a".into(), var, &settings)
            };
            let (mut in_place, mut composed) = (new()?, new()?);
            composed.in_place = false;
            for step in 1..6u64 {
                if step == 4 {
                    // Written to from outside.
                    let written = (start.to_dtype(DType::F32)? * 0.5)?.to_dtype(dtype)?;
                    in_place.var.set(&written)?;
                    composed.var.set(&written)?;
                }
                // Squares of these are beyond the range of f32; in f16 the numbers themselves would be.
                let is_half = dtype == DType::F16 || masters == Some(half);
                let size = if step == 3 && !is_half { 3e19 } else { 1. };
                let grad = ((start.to_dtype(DType::F32)? * step as f64)?.cos()? * size)?;
                let grad = grad.to_dtype(dtype)?;
                let rates = Rates {
                    lr: 1e-2,
                    weight_decay: 0.01,
                    clip: 0.7,
                    step,
                    index: 7,
                    begins: false,
                };
                for variable in [&mut in_place, &mut composed] {
                    let mut shared = Shared::default();
                    Parameter::<R>::update(variable, &rule, &grad, &rates, &mut shared)?;
                }
                assert_eq!(all_bits(&in_place)?, all_bits(&composed)?, "{dtype:?}");
                assert_eq!(
                    in_place.state.master.is_some(),
                    in_place.keeping.copy_dtype().is_some()
                );
            }
        }
        Ok(())
    }

    #[test]
    fn adamw() -> error::Result<()> {
        let fp8 = Fp8Moments::default();
        for moments in [
            MomentStorage::F32,
            MomentStorage::Fp8(fp8),
            MomentStorage::Fp8(fp8.with_expansion(false).with_stochastic(false)),
        ] {
            composed_equals_in_place(AdamWConfig {
                seed: 3,
                moments,
                ..AdamWConfig::default()
            })?;
        }
        Ok(())
    }

    #[test]
    fn sgd() -> error::Result<()> {
        let config = SgdConfig::default().with_seed(3);
        composed_equals_in_place(config.clone())?;
        let momentum = config.clone().with_momentum(0.9).with_dampening(0.3);
        composed_equals_in_place(momentum.clone())?;
        composed_equals_in_place(momentum.with_moments(MomentStorage::Fp8(Fp8Moments::default())))?;
        composed_equals_in_place(config.with_momentum(0.9).with_nesterov(true))
    }
}
