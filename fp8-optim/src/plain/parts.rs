//! Optimizers of models of which ranks hold some variables in parts and the others whole.

use super::super::divided::Divided;
use super::super::engine::Engine;
use super::super::error::{OptimError, Result};
use super::super::rule::Rule;
use super::variable::Variable;
use fp8_ranks::ProcessGroup;

impl<R: Rule> Engine<R, Variable> {
    /// Takes steps together with the other ranks of `axis`, over which the variables with `is_part(name)` are divided, while all ranks hold
    /// the others whole: tensor parallel layers. The norm of a step is that of the whole gradients, with whole variables counted once, so
    /// all ranks clip alike; and a gradient or cast that is not finite on one rank makes all of them skip the step.
    ///
    /// All ranks of `axis` call it, and then every [`Engine::apply`] at the same place, which sends 8 bytes and waits for devices. Gradients
    /// of whole variables have to be the same on all ranks. Sums of squares are added in the order of ranks, so the norm may differ by
    /// rounding from that of one process. There is one axis: a model with variables divided over several different axes has no right count here.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use fp8_optim::{Sgd, SgdConfig};
    /// use fp8_ranks::threads;
    ///
    /// let norms = threads::run(2, |group| -> Result<f64, fp8_optim::OptimError> {
    ///     let part = Var::new(&[1f32, 1.], &Device::Cpu)?;
    ///     let whole = Var::new(&[1f32], &Device::Cpu)?;
    ///     let named = vec![("part".to_string(), part.clone()), ("whole".to_string(), whole.clone())];
    ///     let config = SgdConfig::default().with_max_grad_norm(1.);
    ///     let mut optimizer = Sgd::from_named(named, config)?.with_parts(&group, |name| name == "part")?;
    ///     // Gradients: 0 and 0 on rank 0, 2 and 2 on rank 1; 1 on both.
    ///     let factor = 2. * group.rank() as f64;
    ///     let loss = ((part.as_tensor() * factor)?.sum_all()? + whole.sum_all()?)?;
    ///     optimizer.apply(&loss.backward()?)?.grad_norm()
    /// });
    /// for norm in norms {
    ///     assert_eq!(norm?, 3.);
    /// }
    /// # Ok::<(), fp8_optim::OptimError>(())
    /// ```
    ///
    /// # Errors
    /// [`OptimError::Other`] for an optimizer of [`Engine::from_sharded`], whose ranks take their steps together already.
    pub fn with_parts(
        mut self,
        axis: &ProcessGroup,
        is_part: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        if self.shared.exchange.is_some() {
            let text = "an optimizer of sharded parameters cannot have parts over another axis";
            return Err(OptimError::Other(text.into()));
        }
        let is_part = self.names().map(is_part).collect();
        self.shared.divided = Some(Divided::new(axis.clone(), is_part));
        Ok(self)
    }
}
