//! One variable with its moments, and the choice of how it is updated.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};

use fp8_candle::weight_version::WeightVersion;
use fp8_core::StochasticKey;

use super::error;
use super::fused::{Coefficients, FusedUpdate, HostState, State};
use super::masters::{self, HostMaster, Kept, MasterDType};

/// The running means of the gradient and of its square, and the master if there is one.
pub(super) enum Moments {
    /// Host memory, updated in place: contiguous f32, bf16 and f16 variables on the CPU.
    Host(HostState),
    /// Tensors on the variable's device: every other variable. On a CUDA device kernels update them
    /// in place, else each step replaces them.
    Tensors(State<Tensor>),
}

pub(super) struct Slot {
    pub name: String,
    pub var: Var,
    pub decays: bool,
    pub moments: Moments,
    /// What is kept of the variable beside itself.
    pub kept: Kept,
    /// Who keeps FP8 copies of the variable looks at it.
    pub version: WeightVersion,
}

/// Whether updates run over host memory in place.
pub(super) fn is_on_host(var: &Var) -> bool {
    matches!(var.device(), Device::Cpu) && var.dtype() != DType::F64 && var.is_contiguous()
}

impl Slot {
    pub(super) fn new(
        name: String,
        var: Var,
        decays: bool,
        masters: Option<MasterDType>,
    ) -> error::Result<Self> {
        // The one place where the way of updating is chosen.
        let moments = if is_on_host(&var) {
            let len = var.elem_count();
            Moments::Host(State {
                exp_avg: vec![0.0; len],
                exp_avg_sq: vec![0.0; len],
                master: None,
            })
        } else {
            let zeros = || Tensor::zeros(var.shape(), moment_dtype(&var), var.device());
            Moments::Tensors(State {
                exp_avg: zeros()?,
                exp_avg_sq: zeros()?,
                master: None,
            })
        };
        let kept = Kept::of(&var, masters);
        let master = kept.new_copy(&name, &var)?;
        let mut slot = Self {
            version: WeightVersion::of(&var),
            name,
            var,
            decays,
            moments,
            kept: Kept::Variable,
        };
        slot.keep(kept, master)?;
        Ok(slot)
    }

    /// Keeps this from now on, with a copy that [`Kept::new_copy`] has made.
    pub(super) fn keep(&mut self, kept: Kept, copy: Option<Tensor>) -> Result<()> {
        match &mut self.moments {
            Moments::Host(state) => {
                state.master = copy.as_ref().map(HostMaster::from_tensor).transpose()?;
            }
            Moments::Tensors(state) => state.master = copy,
        }
        self.kept = kept;
        Ok(())
    }

    /// One update of the variable and its moments. `grad` has the variable's shape, its dtype or f32, and memory of its own; `key` is what
    /// [`Kept::key`] says.
    pub(super) fn update(
        &mut self,
        grad: &Tensor,
        coefficients: &Coefficients,
        key: Option<StochasticKey>,
    ) -> Result<()> {
        if self.var.elem_count() == 0 {
            // candle's ops hand an empty tensor back as it is, and no variable is set to itself.
            return Ok(());
        }
        match &mut self.moments {
            Moments::Host(state) => {
                let op = FusedUpdate::new(coefficients, key, state);
                self.var.inplace_op2(&grad.contiguous()?, &op)
            }
            Moments::Tensors(state) => composed(&self.var, grad, state, coefficients, key),
        }
    }

    /// Snapshots as tensors of the variable's shape.
    pub(super) fn snapshot(&self) -> Result<State<Tensor>> {
        match &self.moments {
            Moments::Host(state) => state.try_map(
                |values| Tensor::from_slice(values, self.shape(), &Device::Cpu),
                |master| master.to_tensor(self.shape()),
            ),
            // Kernels write to these tensors, so a snapshot is a copy.
            Moments::Tensors(state) if self.var.device().is_cuda() => {
                state.try_map(Tensor::copy, Tensor::copy)
            }
            Moments::Tensors(state) => state.try_map(|t| Ok(t.clone()), |t| Ok(t.clone())),
        }
    }

    /// The moments made of tensors whose shape and dtype were checked before.
    pub(super) fn moments_from(&self, loaded: &State<&Tensor>) -> Result<Moments> {
        match self.moments {
            Moments::Host(_) => {
                let values = |tensor: &&Tensor| {
                    let tensor = tensor.to_device(&Device::Cpu)?;
                    tensor.flatten_all()?.to_vec1::<f32>()
                };
                let master = |tensor: &&Tensor| HostMaster::from_tensor(tensor);
                Ok(Moments::Host(loaded.try_map(values, master)?))
            }
            Moments::Tensors(_) => {
                let device = self.var.device();
                // A copy: the loaded tensor may be a variable that someone writes to later.
                let copy =
                    |tensor: &&Tensor| tensor.detach().to_device(device)?.contiguous()?.copy();
                Ok(Moments::Tensors(loaded.try_map(copy, copy)?))
            }
        }
    }

    pub(super) fn shape(&self) -> &Shape {
        self.var.shape()
    }

    pub(super) fn moment_dtype(&self) -> DType {
        moment_dtype(&self.var)
    }
}

impl<T, M> State<T, M> {
    /// The same state in another form.
    fn try_map<U, N>(
        &self,
        f: impl Fn(&T) -> Result<U>,
        master: impl Fn(&M) -> Result<N>,
    ) -> Result<State<U, N>> {
        Ok(State {
            exp_avg: f(&self.exp_avg)?,
            exp_avg_sq: f(&self.exp_avg_sq)?,
            master: self.master.as_ref().map(master).transpose()?,
        })
    }
}

/// f64 for an f64 variable, f32 for every other: in bf16 the second moment would never move, since
/// `1 - beta2` is below half a unit in the last place.
pub(super) fn moment_dtype(var: &Var) -> DType {
    if var.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// The update made of candle's own ops, for any dtype and device; computes in the dtype of the
/// moments and rounds to the variable's dtype once, at the end.
fn composed(
    var: &Var,
    grad: &Tensor,
    state: &mut State<Tensor>,
    c: &Coefficients,
    key: Option<StochasticKey>,
) -> Result<()> {
    let dtype = moment_dtype(var);
    let theta = masters::current(var, state.master.as_ref(), dtype)?;
    let grad = grad.detach().to_dtype(dtype)?;
    let grad = if c.clip == 1.0 {
        grad
    } else {
        (grad * c.clip)?
    };
    let next_m = ((&state.exp_avg * c.beta1)? + (&grad * (1.0 - c.beta1))?)?;
    let next_v = ((&state.exp_avg_sq * c.beta2)? + (grad.sqr()? * (1.0 - c.beta2))?)?;
    let adjusted = ((&next_m * c.correction1)? / ((&next_v * c.correction2)?.sqrt()? + c.eps)?)?;
    let next_theta = ((theta * c.decay)? - (adjusted * c.lr)?)?;
    masters::store(var, next_theta, &mut state.master, key)?;
    state.exp_avg = next_m;
    state.exp_avg_sq = next_v;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices without kernels of their own take the composed update; here it is held against the
    /// fused one.
    #[test]
    fn composed_equals_fused() -> error::Result<()> {
        let (wide, half, brain) = (MasterDType::F32, MasterDType::F16, MasterDType::Bf16);
        for (dtype, masters) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::BF16, Some(wide)),
            (DType::F16, Some(wide)),
            (DType::F32, Some(half)),
            (DType::F32, Some(brain)),
            (DType::BF16, Some(half)),
            (DType::F16, Some(half)),
        ] {
            let values: Vec<f32> = (0..999).map(|i| (i as f32 * 0.37).sin()).collect();
            let start = Tensor::from_vec(values, 999, &Device::Cpu)?.to_dtype(dtype)?;
            let fused_var = Var::from_tensor(&start)?;
            let mut fused = Slot::new("a".into(), fused_var, true, masters)?;
            let var = Var::from_tensor(&start)?;
            let mut state = fused.snapshot()?;
            for step in 1..6i32 {
                if step == 4 {
                    // Written to from outside.
                    let written = (start.to_dtype(DType::F32)? * 0.5)?.to_dtype(dtype)?;
                    fused.var.set(&written)?;
                    var.set(&written)?;
                }
                let grad = (start.to_dtype(DType::F32)? * f64::from(step))?.cos()?;
                let grad = grad.to_dtype(dtype)?;
                let c = Coefficients {
                    lr: 1e-3,
                    beta1: 0.9,
                    beta2: 0.95,
                    eps: 1e-8,
                    decay: 0.999,
                    correction1: 1.0 / (1.0 - 0.9f64.powi(step)),
                    correction2: 1.0 / (1.0 - 0.95f64.powi(step)),
                    clip: 0.7,
                };
                let key = fused.kept.key(3, step as u64, 7);
                fused.update(&grad, &c, key)?;
                composed(&var, &grad, &mut state, &c, key)?;
                let wide = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
                let expected = fused.snapshot()?;
                assert_eq!(wide(&var)?, wide(&fused.var)?);
                assert_eq!(wide(&state.exp_avg)?, wide(&expected.exp_avg)?);
                assert_eq!(wide(&state.exp_avg_sq)?, wide(&expected.exp_avg_sq)?);
                assert_eq!(state.master.is_some(), fused.kept.copy_dtype().is_some());
                if let (Some(a), Some(b)) = (&state.master, &expected.master) {
                    assert_eq!(wide(a)?, wide(b)?);
                }
            }
        }
        Ok(())
    }
}
