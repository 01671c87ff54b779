//! Optimizers of parameters of which each rank holds a part.

use super::super::counter::Counter;
use super::super::engine::Engine;
use super::super::error::{OptimError, Result};
use super::super::exchange::Exchange;
use super::super::moments::MomentStorage;
use super::super::rule::{Rule, checked_settings};
use super::super::settings::Settings;
use super::super::shared::Shared;
use super::variable::Variable;
use fp8_ranks::ShardedVarMap;

impl<R: Rule> Engine<R, Variable> {
    /// An optimizer of this rank's parts of the parameters in `map`; moments lie where their parts are. All ranks call it after the model
    /// was built, and then take their steps together: norm, clipping and skipped steps are those of the whole gradients, to the bit, and
    /// weight decay goes by the dimensions of whole parameters.
    ///
    /// ```
    /// use candle_core::{Device, Module, Tensor};
    /// use fp8_optim::{AdamW, AdamWConfig};
    /// use fp8_ranks::{ShardedVarMap, threads};
    /// # type Failed = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// let weights = threads::run(2, |group| -> Result<_, Failed> {
    ///     let map = ShardedVarMap::new(&group, &Device::Cpu);
    ///     let init = candle_nn::Init::Const(1.);
    ///     map.var_builder().get_with_hints((4, 8), "w", init)?;
    ///     let w = map.get("w").unwrap();
    ///     w.claim(); // layers of `nn` do
    ///     let mut optimizer = AdamW::from_sharded(&map, AdamWConfig::default())?;
    ///     let x = Tensor::full(group.rank() as f32, (2, 8), &Device::Cpu)?;
    ///     let loss = candle_nn::Linear::new(w.value()?, None).forward(&x)?.sum_all()?;
    ///     optimizer.apply(&loss.backward()?)?;
    ///     Ok(w.gather()?.to_vec2::<f32>()?)
    /// });
    /// let weights: Result<Vec<_>, _> = weights.into_iter().collect();
    /// let weights = weights.map_err(|error| error.to_string())?;
    /// assert!(weights[0] == weights[1] && weights[0][3][7] < 1.);
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`ShardedVarMap::check`]; [`OptimError::ShardedMasters`]; [`OptimError::ShardedMoments`];
    /// [`OptimError::InvalidHyperparameter`].
    pub fn from_sharded(map: &ShardedVarMap, config: R) -> Result<Self> {
        let settings = checked_settings(&config)?;
        check_parts(&settings)?;
        map.check()?;
        // With those of which this rank holds nothing: names and counts are the same on all ranks.
        let variables = map.vars().into_iter().map(|var| {
            let variable =
                Variable::new::<R>(var.name().to_string(), var.shard().clone(), &settings)?;
            Ok(variable.with_whole(var.placeholder().clone()))
        });
        let variables = variables.collect::<Result<Vec<_>>>()?;
        let shared = Shared {
            exchange: Some(Exchange::new(map)),
            ..Shared::default()
        };
        Ok(Self::with_parameters(
            variables,
            config,
            Counter::Host(0),
            shared,
        ))
    }
}

/// Fails for settings that optimizers of parts do not take.
pub(super) fn check_parts(settings: &Settings) -> Result<()> {
    if settings.masters.is_some() {
        return Err(OptimError::ShardedMasters);
    }
    if settings.moments != MomentStorage::F32 {
        return Err(OptimError::ShardedMoments);
    }
    Ok(())
}
