//! Any differentiable function within a wide node.

use super::{Wide, WideNode};
use crate::base::error::Result;
use candle_core::{Tensor, Var};

impl WideNode {
    /// Applies `f`, for which this crate has no operation, to these values. candle must be able to differentiate it, and
    /// equal inputs must give equal results: it runs again in the backward pass, on variables, for its gradients. Variables
    /// that `f` captures get none.
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
        let to = ids.clone();
        Ok(self.record_tensor(tensor, &ids, move |sweep, grad| {
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
        }))
    }
}
