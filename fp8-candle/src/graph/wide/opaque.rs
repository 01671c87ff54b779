//! Any differentiable function within a wide node.

use super::kept::Kept;
use super::value::Value;
use super::{Wide, WideNode};
use crate::base::error::Result;
use candle_core::{Tensor, Var};

impl WideNode {
    /// What `f`, which must be differentiable by candle and always give the same, makes of these values. It runs once more in the
    /// backward pass, on variables, for its gradients: for what has no operation of its own here. Variables that `f` captures get
    /// none.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn apply(
        &mut self,
        values: &[&Wide],
        f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Wide> {
        let inputs = values.iter().map(|value| Ok(value.value.get()?.clone()));
        let inputs = inputs.collect::<Result<Vec<Tensor>>>()?;
        let tensor = f(&inputs)?.detach();
        let ids: Vec<_> = values.iter().map(|value| value.id).collect();
        let kept: Vec<_> = values.iter().map(|value| value.kept.clone()).collect();
        let result = Kept::Tensor(tensor.clone());
        let to = ids.clone();
        Ok(
            self.record(Value::Made(tensor), result, &ids, move |sweep, grad| {
                let mut args = vec![];
                let mut vars = vec![];
                for (kept, id) in kept.iter().zip(&to) {
                    let value = kept.get(&mut sweep.memos)?;
                    let var = id.map(|_| Var::from_tensor(&value)).transpose()?;
                    args.push(var.as_ref().map_or(value, |var| var.as_tensor().clone()));
                    vars.push(var);
                }
                let y = f(&args)?;
                // Collected separately: an outer collection must not see these variables.
                let grads = crate::graph::backward(&(y * grad)?.sum_all()?)?;
                for (var, id) in vars.iter().zip(&to) {
                    if let Some(grad) = var.as_ref().and_then(|var| grads.get(var)) {
                        sweep.add_shared(*id, grad)?;
                    }
                }
                Ok(())
            }),
        )
    }
}
