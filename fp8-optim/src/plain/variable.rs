//! One variable with its moments and its master.

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use fp8_candle::weight_version::WeightVersion;

use super::super::error;
use super::super::host::{self, HostValues, Keys, Pass, Slice};
use super::super::masters::{Keeping, MasterDType};
use super::super::parameter::Parameter;
use super::super::rounding::RoundTo;
use super::super::rule::{MAX_MOMENTS, Rates, Rule};
use super::super::state_reader::StateReader;
use super::collect::gradient;
use super::composed;
use super::shared::Shared;

/// A variable of candle with what an optimizer keeps of it.
pub struct Variable {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) keeping: Keeping,
    pub(super) stored: Stored,
    /// Where layers that keep FP8 copies of the variable learn of changes.
    pub(super) version: WeightVersion,
}

/// Moments, unless they have not begun, and the master if there is one.
pub enum Stored {
    /// Host memory that is updated in place: contiguous f32, bf16 and f16 variables on the CPU.
    Host(State<HostValues>),
    /// Tensors on the variable's device: all other variables. On a CUDA device kernels update them in place, otherwise each step replaces
    /// them.
    Tensors(State<Tensor>),
}

pub struct State<T> {
    pub(super) moments: Option<Vec<T>>,
    pub(super) master: Option<T>,
}

impl<T> State<T> {
    fn try_map<U>(&self, f: impl Fn(&T) -> Result<U>) -> Result<State<U>> {
        let moments = self.moments.as_ref();
        let moments = moments.map(|all| all.iter().map(&f).collect::<Result<Vec<U>>>());
        Ok(State {
            moments: moments.transpose()?,
            master: self.master.as_ref().map(f).transpose()?,
        })
    }
}

impl Variable {
    pub(super) fn new<R: Rule>(
        name: String,
        var: Var,
        masters: Option<MasterDType>,
    ) -> error::Result<Self> {
        let keeping = Keeping::of(&var, masters);
        let master = keeping.new_copy(&name, &var)?;
        let mut variable = Self {
            version: WeightVersion::of(&var),
            name,
            keeping,
            stored: match is_on_host(&var) {
                true => Stored::Host(State {
                    moments: None,
                    master: None,
                }),
                false => Stored::Tensors(State {
                    moments: None,
                    master: None,
                }),
            },
            var,
        };
        variable.keep(keeping, master)?;
        if R::MOMENT_COUNT.is_none() {
            variable.begin::<R>()?;
        }
        Ok(variable)
    }

    /// Keeps a copy that [`Keeping::new_copy`] has made, or none.
    pub(super) fn keep(&mut self, keeping: Keeping, copy: Option<Tensor>) -> Result<()> {
        match &mut self.stored {
            Stored::Host(state) => {
                state.master = copy.as_ref().map(HostValues::from_tensor).transpose()?;
            }
            Stored::Tensors(state) => state.master = copy,
        }
        self.keeping = keeping;
        Ok(())
    }

    /// Makes moments of zeros.
    fn begin<R: Rule>(&mut self) -> Result<()> {
        let (len, dtype) = (self.var.elem_count(), self.moment_dtype());
        match &mut self.stored {
            Stored::Host(state) => {
                let zeros = R::MOMENTS.iter().map(|_| HostValues::zeros(dtype, len));
                state.moments = Some(zeros.collect());
            }
            Stored::Tensors(state) => {
                let zeros = || Tensor::zeros(self.var.shape(), dtype, self.var.device());
                let zeros = R::MOMENTS.iter().map(|_| zeros());
                state.moments = Some(zeros.collect::<Result<_>>()?);
            }
        }
        Ok(())
    }

    fn begun(&self) -> bool {
        match &self.stored {
            Stored::Host(state) => state.moments.is_some(),
            Stored::Tensors(state) => state.moments.is_some(),
        }
    }

    /// f64 for an f64 variable, f32 for all others: in bf16 a second moment would never move, since `1 - beta2` is below half a unit in
    /// the last place.
    fn moment_dtype(&self) -> DType {
        match self.var.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// Copies as tensors of the variable's shape.
    fn snapshot(&self) -> Result<State<Tensor>> {
        match &self.stored {
            Stored::Host(state) => state.try_map(|values| values.to_tensor(self.var.shape())),
            // Shared write to these tensors.
            Stored::Tensors(state) if self.var.device().is_cuda() => state.try_map(Tensor::copy),
            Stored::Tensors(state) => state.try_map(|tensor| Ok(tensor.clone())),
        }
    }

    /// The update in one of the two ways; `rates.begins` is set.
    fn run<R: Rule>(&mut self, rule: &R, grad: &Tensor, rates: &Rates) -> Result<()> {
        let key = (self.keeping).key(rule.settings().seed, rates.step, rates.index as u32);
        let (has_moments, dtype) = (rule.has_moments(), self.moment_dtype());
        match &mut self.stored {
            Stored::Host(state) => {
                let mut used = state.moments.iter_mut().flatten().filter(|_| has_moments);
                let moments: [_; MAX_MOMENTS] = std::array::from_fn(|_| used.next());
                let (formula, clip) = (rule.formula::<f32>(rates), rates.clip as f32);
                let grad = grad.contiguous()?;
                Slice::with(&grad, None, |grad| {
                    let pass = Pass {
                        grad,
                        moments,
                        master: state.master.as_mut(),
                        keys: Keys {
                            parameter: key,
                            ..Keys::default()
                        },
                        saturating: false,
                    };
                    host::run::<R>(
                        &self.var,
                        pass,
                        #[inline(always)]
                        |theta, grad, moments: &mut [f32]| formula(theta, grad * clip, moments),
                    )
                })??;
            }
            Stored::Tensors(state) => {
                let moments = state.moments.iter().filter(|_| has_moments).flatten();
                let next = composed::update(
                    &self.var,
                    composed::clipped(grad, dtype, rates.clip)?,
                    moments.cloned().collect(),
                    &mut state.master,
                    key,
                    rule.formula(rates),
                )?;
                if has_moments {
                    state.moments = Some(next);
                }
            }
        }
        Ok(())
    }
}

/// Whether updates run over host memory in place.
fn is_on_host(var: &Var) -> bool {
    matches!(var.device(), Device::Cpu) && var.dtype() != DType::F64 && var.is_contiguous()
}

fn moment_name(variable: &str, moment: &str) -> String {
    format!("{variable}.{moment}")
}

impl<R: Rule> Parameter<R> for Variable {
    type Grads = GradStore;
    type Grad = Tensor;
    type Loaded = Stored;
    type Shared = Shared;

    const KIND: &'static str = R::KIND;

    fn name(&self) -> &str {
        &self.name
    }

    fn tensor(&self) -> &Tensor {
        &self.var
    }

    fn gradient(&self, grads: &GradStore, own: &HashSet<usize>) -> error::Result<Option<Tensor>> {
        gradient(&self.name, &self.var, grads, own)
    }

    fn update(&mut self, rule: &R, grad: &Tensor, rates: &Rates, _: &mut Shared) -> Result<()> {
        if self.var.elem_count() == 0 {
            // candle's operations return an empty tensor as it is, and a variable cannot be set to itself.
            return Ok(());
        }
        let begins = !self.begun();
        if begins && rule.has_moments() {
            self.begin::<R>()?;
        }
        let done = self.run(rule, grad, &Rates { begins, ..*rates });
        if begins && done.is_err() {
            match &mut self.stored {
                Stored::Host(state) => state.moments = None,
                Stored::Tensors(state) => state.moments = None,
            }
        }
        done
    }

    fn save(&self, state: &mut HashMap<String, Tensor>) -> error::Result<bool> {
        let snapshot = self.snapshot()?;
        let begun = snapshot.moments.is_some();
        for (moment, tensor) in R::MOMENTS
            .iter()
            .zip(snapshot.moments.into_iter().flatten())
        {
            state.insert(moment_name(&self.name, moment.name), tensor);
        }
        if let Some(master) = snapshot.master {
            state.insert(moment_name(&self.name, MASTER), master);
        }
        Ok(begun)
    }

    fn check(&self, state: &mut StateReader<'_>) -> error::Result<Stored> {
        let shape: &Shape = self.var.shape();
        let names: Vec<String> = (R::MOMENTS.iter())
            .map(|moment| moment_name(&self.name, moment.name))
            .collect();
        let begun = R::MOMENT_COUNT.is_none() || names.iter().any(|name| state.has(name));
        let mut moments = vec![];
        for (name, moment) in names.iter().zip(R::MOMENTS).filter(|_| begun) {
            moments.push(state.take(name, self.moment_dtype(), shape, moment.non_negative)?);
        }
        let loaded = State {
            moments: begun.then_some(moments),
            master: match self.keeping.copy_dtype() {
                Some(dtype) => {
                    Some(state.take(&moment_name(&self.name, MASTER), dtype, shape, false)?)
                }
                None => None,
            },
        };
        Ok(match self.stored {
            Stored::Host(_) => Stored::Host(loaded.try_map(|t| HostValues::from_tensor(t))?),
            // A copy: the loaded tensor may be a variable that somebody writes to later.
            Stored::Tensors(_) => Stored::Tensors(loaded.try_map(|tensor| {
                let tensor = tensor.detach().to_device(self.var.device())?;
                tensor.contiguous()?.copy()
            })?),
        })
    }

    fn has_moments(loaded: &Stored) -> bool {
        match loaded {
            Stored::Host(state) => state.moments.is_some(),
            Stored::Tensors(state) => state.moments.is_some(),
        }
    }

    fn restore(&mut self, loaded: Stored) {
        self.stored = loaded;
    }

    fn invalidate(shared: &mut Shared) {
        shared.forget_kernels();
    }

    fn restored(shared: &mut Shared) {
        shared.forget_kernels();
    }

    fn rounding(_: &Shared) -> Option<RoundTo> {
        None
    }

    fn set_rounding(_: &mut Shared, _: RoundTo) {}
}

const MASTER: &str = "master_param";

#[cfg(test)]
mod tests {
    use super::super::super::adamw::AdamWConfig;
    use super::super::super::sgd::SgdConfig;
    use super::*;

    type Bits = Vec<f32>;

    fn bits(t: &Tensor) -> Result<Bits> {
        t.to_dtype(DType::F32)?.to_vec1()
    }

    fn all_bits(variable: &Variable) -> Result<(Bits, Option<Vec<Bits>>, Option<Bits>)> {
        let state = variable.snapshot()?.try_map(bits)?;
        Ok((bits(&variable.var)?, state.moments, state.master))
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
                Variable::new::<R>("a".into(), var, masters)
            };
            let (mut in_place, mut composed) = (new()?, new()?);
            composed.stored = Stored::Tensors(composed.snapshot()?);
            for step in 1..6u64 {
                if step == 4 {
                    // Written to from outside.
                    let written = (start.to_dtype(DType::F32)? * 0.5)?.to_dtype(dtype)?;
                    in_place.var.set(&written)?;
                    composed.var.set(&written)?;
                }
                let grad = (start.to_dtype(DType::F32)? * step as f64)?.cos()?;
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
                    in_place.snapshot()?.master.is_some(),
                    in_place.keeping.copy_dtype().is_some()
                );
            }
        }
        Ok(())
    }

    #[test]
    fn adamw() -> error::Result<()> {
        composed_equals_in_place(AdamWConfig {
            seed: 3,
            ..AdamWConfig::default()
        })
    }

    #[test]
    fn sgd() -> error::Result<()> {
        let config = SgdConfig::default().with_seed(3);
        composed_equals_in_place(config.clone())?;
        composed_equals_in_place(config.clone().with_momentum(0.9).with_dampening(0.3))?;
        composed_equals_in_place(config.with_momentum(0.9).with_nesterov(true))
    }
}
