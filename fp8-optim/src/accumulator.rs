//! One optimizer step from several micro-batches.

use super::error::{OptimError, Result};
use super::gradients::vars_of;
use super::veto::{CastVeto, JudgedCasts, poison_smallest};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use fp8_candle::weight_version::WeightVersion;
use std::collections::HashSet;

/// Adds up the gradients of micro-batches, for one optimizer step from a batch that does not fit into memory at once.
///
/// The mean over micro-batches of the gradients of mean losses is the gradient of the mean loss of the whole batch, within rounding; where
/// the sizes of micro-batches differ, give each its size as weight. Gradients of bf16 and f16 variables are added in f32 and rounded once,
/// at the end; no other copies are kept. Gradients of anything but the variables are dropped at once.
///
/// If a cast saw Inf or NaN in a micro-batch, the sum becomes NaN and the optimizer skips the step: a saturating cast hides such values,
/// so the gradients may look finite.
///
/// One guard may span all micro-batches of a step: they then share their scales, and closing the guard adds one entry to each history.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{Optimizer, VarBuilder, VarMap};
/// use fp8_optim::{AdamW, AdamWConfig, GradAccumulator, check_gradients};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = candle_nn::linear(16, 8, vb.pp("fc"))?;
/// let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
///
/// let mut accumulator = GradAccumulator::new(&vars);
/// let batch = Tensor::randn(0f32, 1., (32, 16), &Device::Cpu)?;
/// for _step in 0..2 {
///     for micro_batch in batch.chunk(4, 0)? {
///         let loss = model.forward(&micro_batch)?.sqr()?.mean_all()?;
///         accumulator.add(loss.backward()?)?;
///     }
///     let grads = accumulator.finish_mean()?;
///     assert!(check_gradients(&vars, &grads).is_empty());
///     optimizer.step(&grads)?; // candle's interface; any other optimizer takes the gradients too
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct GradAccumulator {
    vars: Vars,
    sum: Sum,
    judged: JudgedCasts,
}

#[derive(Debug, Default)]
struct Sum {
    /// By variable; f32 for bf16 and f16 variables.
    grads: GradStore,
    /// Of [`CastVeto::marks`]: of micro-batches so far, none of which has reached a variable.
    marks: Vec<Tensor>,
    weight: f64,
    micro_batches: usize,
}

enum Vars {
    Map(VarMap),
    List(Vec<Var>),
}

impl std::fmt::Debug for Vars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} variables", self.all().len())
    }
}

impl Vars {
    /// The variables of float dtypes, since others have no gradient. A tied variable, which has two names, is listed once.
    fn all(&self) -> Vec<Var> {
        let mut vars: Vec<Var> = match self {
            Vars::Map(map) => vars_of(map).into_iter().map(|(_, var)| var).collect(),
            Vars::List(vars) => vars.clone(),
        };
        let mut seen = HashSet::new();
        vars.retain(|var| var.dtype().is_float() && seen.insert(var.id()));
        vars
    }
}

/// The tensors of these variables, which are no longer in `store` then.
fn taken(vars: &[Var], store: &mut GradStore) -> Vec<(Var, Tensor)> {
    let vars = vars.iter();
    vars.filter_map(|var| store.remove(var).map(|tensor| (var.clone(), tensor)))
        .collect()
}

fn has_elements(tensors: &[(Var, Tensor)]) -> bool {
    tensors.iter().any(|(_, tensor)| tensor.elem_count() > 0)
}

impl GradAccumulator {
    /// Adds up the gradients of all variables of `vars`, including variables that are added to it later.
    pub fn new(vars: &VarMap) -> Self {
        Self::of(Vars::Map(vars.clone()))
    }

    /// Adds up the gradients of these variables, for example those of adapters.
    pub fn from_vars(vars: Vec<Var>) -> Self {
        Self::of(Vars::List(vars))
    }

    fn of(vars: Vars) -> Self {
        Self {
            vars,
            sum: Sum::default(),
            judged: JudgedCasts::default(),
        }
    }

    /// Adds the gradients of one micro-batch with the weight 1.
    ///
    /// # Errors
    /// If a device fails; all gradients that were added are dropped then.
    pub fn add(&mut self, grads: GradStore) -> Result<()> {
        self.add_weighted(grads, 1.)
    }

    /// Adds `weight` times the gradients of one micro-batch, usually its number of samples or tokens: a step whose last micro-batch
    /// is smaller gets the mean over all of them.
    ///
    /// # Errors
    /// [`OptimError::MicroBatchWeight`] unless `weight` is positive and finite, and as [`GradAccumulator::add`].
    pub fn add_weighted(&mut self, mut grads: GradStore, weight: f64) -> Result<()> {
        if !(weight > 0. && weight.is_finite()) {
            return Err(OptimError::MicroBatchWeight { weight });
        }
        let vars = self.vars.all();
        let versions: Vec<WeightVersion> = vars.iter().map(|var| WeightVersion::of(var)).collect();
        let mut own: Vec<(Var, Tensor)> = taken(&vars, &mut grads);
        // The optimizer sees only the casts of the latest micro-batch, so those of each are checked here.
        let (veto, judged) = CastVeto::of(versions.iter(), &self.judged)?;
        if let Err(error) = veto
            .marks()
            .and_then(|marks| self.mark(marks, &mut own, &vars))
        {
            self.clear();
            return Err(error);
        }
        self.judged = judged;
        for (var, grad) in own {
            if let Err(error) = self.add_one(&var, grad, weight) {
                // Part of the micro-batch may have been added already, so the sum is unusable.
                self.clear();
                return Err(error.into());
            }
        }
        self.sum.weight += weight;
        self.sum.micro_batches += 1;
        Ok(())
    }

    /// Shows in gradients what the casts of a micro-batch have seen: in its own, in the sums if it reaches no variable, or in those of the
    /// next one.
    fn mark(&mut self, marks: Vec<Tensor>, own: &mut [(Var, Tensor)], vars: &[Var]) -> Result<()> {
        self.sum.marks.extend(marks);
        let mut sums = match has_elements(own) {
            true => vec![],
            false => taken(vars, &mut self.sum.grads),
        };
        let done = match has_elements(own) || has_elements(&sums) {
            false => Ok(()),
            true => {
                let marks = std::mem::take(&mut self.sum.marks);
                let all = own.iter_mut().chain(&mut sums);
                poison_smallest(all.map(|(_, grad)| grad), &marks)
            }
        };
        for (var, sum) in sums {
            self.sum.grads.insert(&var, sum);
        }
        done
    }

    fn add_one(&mut self, var: &Var, grad: Tensor, weight: f64) -> candle_core::Result<()> {
        let mut grad = grad.detach().to_dtype(sum_dtype(var))?;
        if weight != 1. {
            grad = (grad * weight)?;
        }
        // Removed first, so that a variable's old sum is freed before the next variable's new sum is made.
        let sum = match self.sum.grads.remove(var) {
            None => grad,
            Some(sum) => (sum + grad)?,
        };
        self.sum.grads.insert(var, sum);
        Ok(())
    }

    /// The number of micro-batches added since the last step.
    pub fn micro_batches(&self) -> usize {
        self.sum.micro_batches
    }

    /// Drops all gradients that were added.
    pub fn clear(&mut self) {
        self.sum = Sum::default();
    }

    /// The weighted mean of the gradients, in the dtypes of the variables; the next sum begins empty. A variable that no micro-batch has
    /// reached has no gradient.
    ///
    /// # Errors
    /// [`OptimError::NothingAccumulated`] before the first micro-batch, and if a device fails.
    pub fn finish_mean(&mut self) -> Result<GradStore> {
        self.finish(1. / self.sum.weight)
    }

    /// The weighted sum of the gradients, for losses that are sums; otherwise as [`GradAccumulator::finish_mean`].
    ///
    /// # Errors
    /// As [`GradAccumulator::finish_mean`].
    pub fn finish_sum(&mut self) -> Result<GradStore> {
        self.finish(1.)
    }

    /// The weighted sum in the dtype of sums, and its weight; the next sum begins empty.
    pub(crate) fn take(&mut self) -> Result<(GradStore, f64)> {
        if self.sum.micro_batches == 0 {
            return Err(OptimError::NothingAccumulated);
        }
        let sum = std::mem::take(&mut self.sum);
        Ok((sum.grads, sum.weight))
    }

    fn finish(&mut self, factor: f64) -> Result<GradStore> {
        let (mut sum, _) = self.take()?;
        for var in self.vars.all() {
            if let Some(mut grad) = sum.remove(&var) {
                if factor != 1. {
                    grad = (grad * factor)?;
                }
                sum.insert(&var, grad.to_dtype(var.dtype())?);
            }
        }
        Ok(sum)
    }
}

/// f32 for bf16 and f16: in a sum with 8 bits, later gradients would be rounded away.
pub(crate) fn sum_dtype(var: &Var) -> DType {
    match var.dtype() {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn grads(var: &Var, factor: f64) -> GradStore {
        let loss = (var.as_tensor() * factor).unwrap().sum_all().unwrap();
        loss.backward().unwrap()
    }

    fn values(grads: &GradStore, var: &Var) -> Vec<f32> {
        let grad = grads.get(var).unwrap();
        assert_eq!(grad.dtype(), var.dtype());
        grad.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn mean_and_sum() -> Result<()> {
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let mut all = GradAccumulator::from_vars(vec![var.clone()]);
        for factor in [1., 2., 6.] {
            all.add(grads(&var, factor))?;
        }
        assert_eq!(all.micro_batches(), 3);
        assert_eq!(values(&all.finish_mean()?, &var), [3., 3.]);
        assert_eq!(all.micro_batches(), 0);
        all.add(grads(&var, 4.))?;
        all.add(grads(&var, 5.))?;
        assert_eq!(values(&all.finish_sum()?, &var), [9., 9.]);
        let fails = all.finish_sum().unwrap_err();
        assert!(matches!(fails, OptimError::NothingAccumulated));
        Ok(())
    }

    /// Weights count as much as sums do.
    #[test]
    fn what_was_added_before_a_clear_is_forgotten() -> Result<()> {
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let mut all = GradAccumulator::from_vars(vec![var.clone()]);
        all.add_weighted(grads(&var, 100.), 7.)?;
        all.clear();
        assert_eq!(all.micro_batches(), 0);
        let fails = all.finish_mean().unwrap_err();
        assert!(matches!(fails, OptimError::NothingAccumulated));
        all.add(grads(&var, 2.))?;
        all.add(grads(&var, 4.))?;
        assert_eq!(all.micro_batches(), 2);
        assert_eq!(values(&all.finish_mean()?, &var), [3., 3.]);
        Ok(())
    }

    #[test]
    fn one_micro_batch_comes_out_as_it_was() -> Result<()> {
        let var = Var::new(&[0.1f32, 0.7], &Device::Cpu)?;
        let loss = var.sqr()?.sum_all()?;
        let expected = values(&loss.backward()?, &var);
        let mut all = GradAccumulator::from_vars(vec![var.clone()]);
        all.add(loss.backward()?)?;
        assert_eq!(values(&all.finish_mean()?, &var), expected);
        Ok(())
    }

    #[test]
    fn a_variable_with_two_names_counts_once() -> Result<()> {
        let vars = VarMap::new();
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        for name in ["head", "embed"] {
            let mut all = vars.data().lock().unwrap();
            all.insert(name.into(), var.clone());
        }
        let mut all = GradAccumulator::new(&vars);
        all.add(grads(&var, 2.))?;
        all.add(grads(&var, 4.))?;
        assert_eq!(values(&all.finish_mean()?, &var), [3., 3.]);
        Ok(())
    }

    #[test]
    fn bf16_is_added_in_f32() -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            let var = Var::ones(1, dtype, &Device::Cpu)?;
            let mut all = GradAccumulator::from_vars(vec![var.clone()]);
            all.add(grads(&var, 4096.))?;
            // Each of them is below half a unit in the last place of the first.
            for _ in 0..256 {
                all.add(grads(&var, 1.))?;
            }
            assert_eq!(values(&all.finish_sum()?, &var), [4352.], "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn only_variables_count_and_a_missed_one_stays_missing() -> Result<()> {
        let vars = VarMap::new();
        let init = candle_nn::Init::Const(1.);
        let mut all = GradAccumulator::new(&vars);
        let get = |name| vars.get(2, name, init, DType::F32, &Device::Cpu);
        let (a, b) = (get("a")?, get("b")?);
        let other = Var::ones(2, DType::F32, &Device::Cpu)?;
        get("c")?;
        all.add((&a * other.as_tensor())?.sum_all()?.backward()?)?;
        all.add((&a + &b)?.sum_all()?.backward()?)?;
        let mean = all.finish_mean()?;
        assert_eq!(crate::check_gradients(&vars, &mean), ["c"]);
        assert_eq!(mean.get_ids().count(), 2);
        // Where a micro-batch does not reach a variable, its gradient is zero.
        assert_eq!(mean.get(&b).unwrap().to_vec1::<f32>()?, [0.5, 0.5]);
        Ok(())
    }

    #[test]
    fn weights_are_positive_numbers() -> Result<()> {
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let mut all = GradAccumulator::from_vars(vec![var.clone()]);
        for weight in [0., -1., f64::NAN, f64::INFINITY] {
            let error = all.add_weighted(grads(&var, 1.), weight).unwrap_err();
            assert!(
                matches!(error, OptimError::MicroBatchWeight { .. }),
                "{error:?}"
            );
        }
        assert_eq!(all.micro_batches(), 0);
        Ok(())
    }
}
