//! The backward pass of a wide node.

use super::memos::Memos;
use super::value::Value;
use crate::base::error::Result;
use crate::device::{add, add_into};
use candle_core::Tensor;

type FromOne = dyn Fn(&mut Sweep, &Value) -> Result<()> + Send + Sync;
type FromMany = dyn Fn(&mut Sweep, Vec<Option<Tensor>>) -> Result<()> + Send + Sync;

/// How gradients go from the results of an operation to its arguments.
pub(crate) enum Backward {
    One(Box<FromOne>),
    /// An operation with several results; a result that was not used has no gradient.
    Many(Box<FromMany>),
}

/// An operation.
pub(crate) struct Step {
    pub(crate) outputs: Vec<usize>,
    pub(crate) backward: Backward,
}

struct Grad {
    value: Value,
    /// Whether this is the only owner of its storage.
    owned: bool,
}

/// The gradients of the values of a node during its backward pass.
pub(crate) struct Sweep {
    grads: Vec<Option<Grad>>,
    /// What was computed again.
    pub(crate) memos: Memos,
}

impl Sweep {
    pub(crate) fn new(values: usize) -> Self {
        Self {
            grads: (0..values).map(|_| None).collect(),
            memos: Memos::default(),
        }
    }

    /// Takes the operations, the latest first.
    pub(crate) fn run(&mut self, steps: &[Step]) -> Result<()> {
        for step in steps.iter().rev() {
            match &step.backward {
                Backward::One(backward) => {
                    let output = step.outputs.first().and_then(|id| self.take(*id));
                    if let Some(grad) = output {
                        backward(self, &grad)?;
                    }
                }
                Backward::Many(backward) => {
                    let mut grads = vec![];
                    for id in &step.outputs {
                        let grad = self.take(*id);
                        grads.push(grad.map(|grad| grad.get().cloned()).transpose()?);
                    }
                    if grads.iter().any(Option::is_some) {
                        backward(self, grads)?;
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, id: usize) -> Option<Value> {
        let grad = self.grads.get_mut(id).and_then(Option::take)?;
        Some(grad.value)
    }

    /// Adds a gradient that the caller computed and no longer needs.
    pub(crate) fn add(&mut self, id: Option<usize>, grad: Tensor) -> Result<()> {
        self.add_value(id, Value::Made(grad))
    }

    /// Adds a gradient that may not be computed yet: the operation that receives it may cast it while computing it.
    pub(crate) fn add_value(&mut self, id: Option<usize>, value: Value) -> Result<()> {
        let owned = true;
        self.meet(id, Grad { value, owned })
    }

    /// Adds a gradient whose storage may have other owners.
    pub(crate) fn add_shared(&mut self, id: Option<usize>, grad: &Tensor) -> Result<()> {
        let (value, owned) = (Value::Made(grad.clone()), false);
        self.meet(id, Grad { value, owned })
    }

    fn meet(&mut self, id: Option<usize>, new: Grad) -> Result<()> {
        let Some(slot) = id.and_then(|id| self.grads.get_mut(id)) else {
            return Ok(());
        };
        *slot = Some(match slot.take() {
            None => new,
            Some(old) => {
                let (a, b) = (old.value.get()?.clone(), new.value.get()?.clone());
                let sum = match (old.owned, new.owned) {
                    (true, _) => add_into(a, &b)?,
                    // Addition commutes to the bit.
                    (false, true) => add_into(b, &a)?,
                    (false, false) => add(&a, &b)?,
                };
                Grad {
                    value: Value::Made(sum),
                    owned: true,
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn gradients_that_meet_add_up_and_leave_those_that_others_hold() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let tensor = |x: f64| Tensor::full(x, 100_000, &Device::Cpu)?.to_dtype(dtype);
            let (shared, mut sweep) = (tensor(1.)?, Sweep::new(2));
            sweep.add_shared(Some(0), &shared)?;
            sweep.add_shared(Some(1), &shared)?;
            sweep.add(Some(0), tensor(2.)?)?;
            sweep.add_shared(Some(0), &shared)?;
            sweep.add_shared(Some(1), &shared)?;
            sweep.add(None, tensor(9.)?)?;
            let mean = |x: Option<Value>| -> Result<f64> {
                let x = match x {
                    Some(x) => x.get()?.clone(),
                    None => tensor(0.)?,
                };
                Ok(x.to_dtype(DType::F64)?.mean_all()?.to_scalar()?)
            };
            assert_eq!((mean(sweep.take(0))?, mean(sweep.take(1))?), (4., 2.));
            assert_eq!(mean(Some(Value::Made(shared)))?, 1.);
            assert!(sweep.take(0).is_none());
        }
        Ok(())
    }
}
