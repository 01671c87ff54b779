//! FP8 state of one layer.

use crate::config::{CastConfig, Operand, Recipe, ResolvedConfig, ScalingType};
use fp8_candle::state::{IdleRule, RowRule};
use fp8_candle::weight_version::WeightVersion;
use fp8_candle::{CastCounter, LayerShards, Role, Shards, Slot, StateTable, WeightCache};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The casts and the weight with which a layer was calibrated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Calibration {
    /// Cast of the inputs: format, granularity, whether its scale is static.
    pub input: CastConfig,
    /// Cast of the weight.
    pub weight: CastConfig,
    /// Whether scales that are not static are rounded down to powers of two.
    #[serde(default)]
    pub round_scales_to_power_of_two: bool,
    /// Fingerprint of the weight that the batches went through.
    pub weight_fingerprint: u64,
}

/// A recipe that one layer follows in place of the guard's.
#[derive(Debug, Clone)]
pub(crate) struct LayerRecipe {
    pub(crate) recipe: Recipe,
    pub(crate) config: Arc<ResolvedConfig>,
}

/// The casts of a role in its two GEMMs.
pub(crate) fn casts_of(config: &ResolvedConfig, role: Role) -> [&CastConfig; 2] {
    match role {
        Role::Weight => [&config.weight, &config.weight_for_grad_input],
        Role::GradOutput => [&config.grad_output, &config.grad_output_for_grad_weight],
        _ => [&config.input, &config.input_for_grad_weight],
    }
}

/// The rule that updates a role's row, and whether its amaxes are reduced over ranks; None if the role has no delayed casts.
pub(crate) fn delayed_rule(config: &ResolvedConfig, role: Role) -> Option<(RowRule, bool)> {
    let mut casts = casts_of(config, role).into_iter();
    let cast = casts.find(|cast| cast.scaling == ScalingType::Delayed)?;
    let (delayed, format) = (config.delayed.as_ref()?, cast.format?);
    let rule = RowRule::new(delayed.rule(), format, delayed.amax_history_len);
    Some((rule, delayed.reduce_amax))
}

/// What [`crate::prepare_fp8`] gives to a layer: its rows in the model's table, its cached FP8 weight and
/// its counters. Clones of the layer share it.
#[derive(Debug)]
pub struct Fp8State {
    path: Arc<str>,
    table: Arc<StateTable>,
    slots: Vec<(Role, Slot)>,
    pub(crate) cache: WeightCache,
    /// By [`Operand`].
    casts: [CastCounter; Operand::COUNT],
    settings: Mutex<LayerSettings>,
}

/// What may change about a layer's state.
#[derive(Debug, Default)]
struct LayerSettings {
    output_fused: bool,
    own_recipe: Option<LayerRecipe>,
    /// The parts that ranks hold of the layer's tensors.
    shards: Option<Arc<LayerShards>>,
    /// Fingerprint of the weight of the last calibration batch.
    calibrated_weight: u64,
    calibration: Option<Calibration>,
    /// The model's parameters, by which optimizers find its table.
    parameters: Arc<[WeightVersion]>,
}

impl Fp8State {
    /// New rows of `table`: quant_scales 1, histories of `amax_history_len` zeros.
    pub(crate) fn new(
        path: Arc<str>,
        roles: &[Role],
        amax_history_len: usize,
        table: &Arc<StateTable>,
    ) -> fp8_candle::Result<Self> {
        let rows: Vec<_> = roles.iter().map(|&role| (&*path, role)).collect();
        let first = table.add_rows(&rows, amax_history_len)?;
        let slots = roles.iter().enumerate();
        Ok(Self {
            slots: slots
                .map(|(i, &role)| (role, Slot::new(table, first + i)))
                .collect(),
            path,
            table: table.clone(),
            cache: WeightCache::default(),
            casts: std::array::from_fn(|_| Arc::new(AtomicU64::new(0))),
            settings: Mutex::default(),
        })
    }

    /// Path of the layer.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn shared_path(&self) -> &Arc<str> {
        &self.path
    }

    /// The table of the model, which holds this layer's rows.
    pub fn table(&self) -> &Arc<StateTable> {
        &self.table
    }

    /// The layer's rows, one for each of its roles.
    pub fn slots(&self) -> &[(Role, Slot)] {
        &self.slots
    }

    /// The row of a role, if the layer has it.
    pub fn slot(&self, role: Role) -> Option<&Slot> {
        let mut slots = self.slots.iter();
        slots.find(|(own, _)| *own == role).map(|(_, slot)| slot)
    }

    /// One past the last row.
    pub(crate) fn rows_end(&self) -> usize {
        let rows = self.slots.iter().map(|(_, slot)| slot.row() + 1);
        rows.max().unwrap_or(0)
    }

    /// How many tensors this layer has cast to FP8, forward and backward; a cached weight counts once.
    pub fn quantized_tensors(&self) -> u64 {
        self.casts.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// How many casts of an operand this layer has made. A copy that serves both uses of an operand counts for the first.
    pub fn casts(&self, operand: Operand) -> u64 {
        self.casts[operand as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn counter(&self, operand: Operand) -> &CastCounter {
        &self.casts[operand as usize]
    }

    /// Whether the output and its gradient stay in high precision because the next operator is fused with this one:
    /// [`PrepareOptions::with_output_fused`](crate::PrepareOptions::with_output_fused).
    pub fn is_output_fused(&self) -> bool {
        self.lock().output_fused
    }

    pub(crate) fn set_output_fused(&self, fused: bool) {
        self.lock().output_fused = fused;
    }

    pub(crate) fn set_shards(&self, shards: Option<Arc<LayerShards>>) {
        self.lock().shards = shards;
    }

    /// Whether this rank has only parts of the layer's tensors.
    pub(crate) fn is_in_parts(&self) -> bool {
        let settings = self.lock();
        settings.shards.as_ref().is_some_and(|shards| {
            let tensors = [&shards.input, &shards.weight, &shards.grad_output];
            !tensors.into_iter().all(Shards::is_whole)
        })
    }

    /// The other parts of a tensor of this layer.
    pub(crate) fn shards(&self, role: Role) -> Shards {
        let settings = self.lock();
        let Some(shards) = &settings.shards else {
            return Shards::default();
        };
        match role {
            Role::Input => shards.input.clone(),
            Role::Weight => shards.weight.clone(),
            Role::GradOutput => shards.grad_output.clone(),
            _ => Shards::default(),
        }
    }

    /// Links the model's parameters to its table.
    pub(crate) fn hold_parameters(&self, parameters: &Arc<[WeightVersion]>) {
        for parameter in parameters.iter() {
            parameter.note_table(&self.table);
        }
        self.lock().parameters = parameters.clone();
    }

    fn lock(&self) -> MutexGuard<'_, LayerSettings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The recipe that this layer follows inside every guard; None if it follows the guard's.
    pub fn own_recipe(&self) -> Option<Recipe> {
        self.lock()
            .own_recipe
            .as_ref()
            .map(|own| own.recipe.clone())
    }

    pub(crate) fn own_config(&self) -> Option<Arc<ResolvedConfig>> {
        self.lock()
            .own_recipe
            .as_ref()
            .map(|own| own.config.clone())
    }

    /// Sets the layer's own recipe. A change discards the calibration, which no longer describes the layer.
    pub(crate) fn set_own_recipe(&self, recipe: Option<LayerRecipe>) {
        for (role, slot) in &self.slots {
            let idle = match &recipe {
                None => IdleRule::OfTheStep,
                Some(own) => match delayed_rule(&own.config, *role) {
                    Some((rule, reduces)) => IdleRule::Own { rule, reduces },
                    None => IdleRule::Never,
                },
            };
            self.table.set_idle_rule(slot.row(), idle);
        }
        let mut settings = self.lock();
        let text = |own: &Option<LayerRecipe>| own.as_ref().map(|own| own.recipe.clone());
        if text(&settings.own_recipe) != text(&recipe) {
            settings.calibration = None;
        }
        settings.own_recipe = recipe;
    }

    /// How the layer was calibrated, if it was and has not been trained in FP8 since.
    pub fn calibration(&self) -> Option<Calibration> {
        self.lock().calibration
    }

    pub(crate) fn set_calibration(&self, calibration: Option<Calibration>) {
        self.lock().calibration = calibration;
    }

    pub(crate) fn calibrated_weight(&self) -> u64 {
        self.lock().calibrated_weight
    }

    pub(crate) fn note_calibrated_weight(&self, fingerprint: u64) {
        self.lock().calibrated_weight = fingerprint;
    }
}
