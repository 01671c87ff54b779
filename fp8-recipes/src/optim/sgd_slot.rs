//! One variable of SGD with its momentum, and its update.

use candle_core::{DType, Device, Result, Tensor, Var};
use fp8_candle::weight_version::WeightVersion;
use fp8_core::StochasticKey;

use super::error;
use super::masters::{self, HostMaster, Kept};
use super::sgd_update::HostUpdate;
use super::slot::{is_on_host, moment_dtype};

/// The numbers of one step of one variable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    /// What gradients are multiplied by first; exactly 1 when nothing is clipped.
    pub clip: f64,
}

/// The running sum of gradients, from the first one on, and the master if there is one.
pub(super) enum Momentum {
    /// Host memory, updated in place: contiguous f32, bf16 and f16 variables on the CPU.
    Host(Option<Vec<f32>>, Option<HostMaster>),
    /// Tensors on the variable's device, which each step replaces: every other variable.
    Tensors(Option<Tensor>, Option<Tensor>),
}

pub(super) struct SgdSlot {
    pub name: String,
    pub var: Var,
    pub decays: bool,
    pub kept: Kept,
    pub momentum: Momentum,
    pub version: WeightVersion,
}

impl SgdSlot {
    pub(super) fn new(name: String, var: Var, decays: bool, kept: Kept) -> error::Result<Self> {
        let master = kept.new_copy(&name, &var)?;
        let momentum = Self::momentum_of(&var, None, master.as_ref())?;
        Ok(Self {
            version: WeightVersion::of(&var),
            name,
            var,
            decays,
            kept,
            momentum,
        })
    }

    /// The form that updates of this variable want, with memory of its own.
    pub(super) fn momentum_of(
        var: &Var,
        buffer: Option<&Tensor>,
        master: Option<&Tensor>,
    ) -> Result<Momentum> {
        if is_on_host(var) {
            let values = |t: &Tensor| t.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>();
            return Ok(Momentum::Host(
                buffer.map(values).transpose()?,
                master.map(HostMaster::from_tensor).transpose()?,
            ));
        }
        let copy = |t: &Tensor| t.detach().to_device(var.device())?.contiguous()?.copy();
        Ok(Momentum::Tensors(
            buffer.map(copy).transpose()?,
            master.map(copy).transpose()?,
        ))
    }

    /// Buffer and master as tensors that no later step changes.
    pub(super) fn snapshot(&self) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let shape = self.var.shape();
        match &self.momentum {
            Momentum::Host(buffer, master) => {
                let buffer = buffer.as_ref();
                let buffer = buffer.map(|values| Tensor::from_slice(values, shape, &Device::Cpu));
                let master = master.as_ref().map(|master| master.to_tensor(shape));
                Ok((buffer.transpose()?, master.transpose()?))
            }
            Momentum::Tensors(buffer, master) => Ok((buffer.clone(), master.clone())),
        }
    }

    pub(super) fn buffer_dtype(&self) -> DType {
        moment_dtype(&self.var)
    }

    /// One update. `grad` has the variable's shape, its dtype or f32, and memory of its own; `key` is what [`Kept::key`] says.
    pub(super) fn update(
        &mut self,
        grad: &Tensor,
        rates: &Rates,
        key: Option<StochasticKey>,
    ) -> Result<()> {
        if self.var.elem_count() == 0 {
            // candle's ops hand an empty tensor back as it is, and no variable is set to itself.
            return Ok(());
        }
        match &mut self.momentum {
            Momentum::Host(buffer, master) => {
                let begins = rates.momentum != 0. && buffer.is_none();
                if begins {
                    *buffer = Some(vec![0.; self.var.elem_count()]);
                }
                // A momentum that was turned off leaves its buffer alone.
                let buffer = buffer.as_mut().filter(|_| rates.momentum != 0.);
                let op = HostUpdate::new(rates, begins, key, buffer, master);
                self.var.inplace_op2(&grad.contiguous()?, &op)
            }
            Momentum::Tensors(buffer, master) => {
                composed(&self.var, grad, buffer, master, rates, key)
            }
        }
    }
}

/// The update made of candle's own ops, for any dtype and device, with the same order of operations.
fn composed(
    var: &Var,
    grad: &Tensor,
    buffer: &mut Option<Tensor>,
    master: &mut Option<Tensor>,
    c: &Rates,
    key: Option<StochasticKey>,
) -> Result<()> {
    let dtype = moment_dtype(var);
    let theta = masters::current(var, master.as_ref(), dtype)?;
    let mut g = grad.detach().to_dtype(dtype)?;
    if c.clip != 1. {
        g = (g * c.clip)?;
    }
    if c.weight_decay != 0. {
        g = (g + (&theta * c.weight_decay)?)?;
    }
    let mut sum = None;
    if c.momentum != 0. {
        let next = match &*buffer {
            // A copy: the gradient is the caller's.
            None => g.copy()?,
            Some(buffer) => ((buffer * c.momentum)? + (&g * (1. - c.dampening))?)?,
        };
        g = match c.nesterov {
            true => (g + (&next * c.momentum)?)?,
            false => next.clone(),
        };
        sum = Some(next);
    }
    masters::store(var, (theta - (g * c.lr)?)?, master, key)?;
    if sum.is_some() {
        *buffer = sum;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::MasterDType;

    /// Devices without loops of their own take the composed update; here it is held against the one in place.
    #[test]
    fn composed_equals_in_place() -> error::Result<()> {
        let (wide, half, brain) = (MasterDType::F32, MasterDType::F16, MasterDType::Bf16);
        for (dtype, masters) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::BF16, Some(wide)),
            (DType::F32, Some(half)),
            (DType::F16, Some(brain)),
            (DType::F16, Some(half)),
        ] {
            for (momentum, dampening, nesterov) in
                [(0., 0., false), (0.9, 0.3, false), (0.9, 0., true)]
            {
                // Several tasks.
                let values: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
                let start = Tensor::from_vec(values, 40_000, &Device::Cpu)?.to_dtype(dtype)?;
                let fused_var = Var::from_tensor(&start.copy()?)?;
                let kept = Kept::of(&fused_var, masters);
                let mut fused = SgdSlot::new("a".into(), fused_var, true, kept)?;
                let var = Var::from_tensor(&start.copy()?)?;
                let (mut buffer, mut master) = fused.snapshot()?;
                for n in 1..5u32 {
                    let grad = (start.to_dtype(DType::F32)? * f64::from(n))?.cos()?;
                    let grad = grad.to_dtype(dtype)?;
                    let c = Rates {
                        lr: 0.1,
                        weight_decay: 0.01,
                        momentum,
                        dampening,
                        nesterov,
                        clip: 0.7,
                    };
                    let key = kept.key(3, n.into(), 7);
                    fused.update(&grad, &c, key)?;
                    composed(&var, &grad, &mut buffer, &mut master, &c, key)?;
                    let wide = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
                    assert_eq!(wide(&var)?, wide(&fused.var)?);
                    let (expected_buffer, expected_master) = fused.snapshot()?;
                    assert_eq!(
                        buffer.as_ref().map(wide).transpose()?,
                        expected_buffer.as_ref().map(wide).transpose()?
                    );
                    assert_eq!(
                        master.as_ref().map(wide).transpose()?,
                        expected_master.as_ref().map(wide).transpose()?
                    );
                }
            }
        }
        Ok(())
    }
}
