//! One model in training: its weights, optimizer, recipe and place in the schedule.

use crate::choice;
use crate::clock::{Clock, Mark};
use crate::data::{Batch, Data};
use crate::gpt::Activations;
use crate::gpt::attention::Operands;
use crate::gpt::{Gpt, GptConfig};
use crate::ranks::{Parallel, Ranks, Travel};
use crate::runs::checkpoints;
use crate::settings::Settings;
use crate::sharded::Sharded;
use crate::weights::{Place, StepOf, Weights, scaled_matmul};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use fp8::checkpoint::{gather_state, quantized_tensors};
use fp8::config::{AttentionProducts, Fp8LinearConfig};
use fp8::fp8_candle::profile;
use fp8::fp8_core::Granularity;
use fp8::optim::{AdamWConfig, LrSchedule, StepReport};
use fp8::ranks::ProcessGroup;
use fp8::training::StepRecord;
use fp8::{
    Autocast, AutocastGuard, CastStats, PrepareReport, Recipe, RecipeName, StatsReport,
    fp8_autocast,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step that the device may not have finished yet.
struct Unread {
    step: u64,
    /// The sum over the micro-batches of this rank.
    loss: Tensor,
    lr: f64,
    report: StepReport,
    marks: (Mark, Mark),
}

pub struct Run {
    pub name: String,
    pub recipe: Option<Recipe>,
    pub model: Gpt,
    /// The model's configuration: that of the settings, with this run's operands of attention.
    pub config: GptConfig,
    pub report: Option<PrepareReport>,
    /// Finished steps.
    pub step: u64,
    pub weights: Weights,
    schedule: LrSchedule,
    pub settings: Settings,
    ranks: Ranks,
    device: Device,
    clock: Clock,
    /// Steps since the last reading.
    unread: Vec<Unread>,
    gradients_checked: bool,
    /// Casts up to the checkpoint that the run was resumed from.
    casts_before: u64,
    stats_every: Option<u64>,
    stats: CastStats,
    /// Where the time of steps went, without the first one of this process.
    pub profile: Option<profile::Report>,
}

impl Run {
    /// `name`: f32, bf16, a recipe of `fp8_recipes`, auto, scaled_fp16 or scaled_fp8.
    pub fn new(name: &str, settings: &Settings, device: &Device, ranks: &Ranks) -> Result<Self> {
        let config = AdamWConfig {
            lr: settings.learning_rate,
            weight_decay: 0.1,
            beta2: 0.95,
            max_grad_norm: Some(1.),
            moments: settings.moments,
            seed: settings.seed,
            ..AdamWConfig::default()
        };
        let matmul = scaled_matmul(name);
        let recipe = match name {
            "f32" | "bf16" => None,
            _ if matmul.is_some() => None,
            choice::AUTO => Some(RecipeName::Delayed.into()),
            other => Some(Recipe::from(other.parse::<RecipeName>().context(
                "--recipe takes f32, bf16, auto, scaled_fp16, scaled_fp8 and the names of FP8 recipes",
            )?)),
        };
        let recipe = match (ranks.parallel, name.parse::<RecipeName>()) {
            (Some(Parallel::ShardedFp8), Ok(name)) => {
                let config = Fp8LinearConfig::from_recipe_name(name);
                Some(config.with_enable_fp8_all_gather(true).into())
            }
            _ => recipe,
        };
        let recipe = recipe.map(|recipe| match recipe {
            Recipe::Linear(config) => config.with_kept_activations(settings.kept).into(),
            other => other,
        });
        let (mut gpt, seed) = (settings.model.clone(), settings.seed);
        let operands = *(gpt.attention).get_or_insert(Operands::of_run(recipe.is_some()));
        let recipe = recipe.map(|recipe| operands.in_recipe(recipe));
        if recipe.is_none() {
            gpt.activations = Activations::F32;
        }
        let (model, mut weights) = match (name, matmul) {
            (_, Some(matmul)) => Weights::scaled(matmul, &gpt, seed, config, device)?,
            _ if ranks.is_sharded() => {
                ensure!(name != "bf16", "bf16: --parallel sharded trains in f32");
                let (gpt, sharded) = Sharded::new(&gpt, seed, config, device, ranks)?;
                (gpt, Weights::Sharded(Box::new(sharded)))
            }
            ("bf16", _) => Weights::plain(DType::BF16, &gpt, seed, config, device)?,
            _ => Weights::plain(DType::F32, &gpt, seed, config, device)?,
        };
        let tokens = settings.batch * settings.model.context / settings.micro_batches;
        let mut slow = settings.slow_layers.clone();
        if name == choice::AUTO && slow.is_none() && ranks.is_parallel() {
            // Each rank would measure other times.
            let recipe = RecipeName::Delayed.into();
            slow = Some(ranks.chosen(|| choice::measured(&recipe, &gpt, tokens, device))?);
        }
        let prepare = |recipe| choice::prepare(name, recipe, &model, tokens, slow.as_deref());
        let report = recipe.as_ref().map(prepare).transpose()?;
        if ranks.is_parallel() {
            weights.join(ranks, name)?;
        }
        // A guard without FP8 layers would only warn.
        let recipe = recipe.filter(|_| report.as_ref().is_some_and(|r| r.converted() > 0));
        let warmup = (settings.steps / 10).clamp(1, 100);
        let schedule =
            LrSchedule::cosine(settings.learning_rate, warmup, settings.steps).with_min_ratio(0.1);
        Ok(Self {
            name: name.to_string(),
            recipe,
            model,
            config: gpt,
            report,
            step: 0,
            weights,
            schedule,
            settings: settings.clone(),
            ranks: ranks.clone(),
            device: device.clone(),
            clock: Clock::new(device),
            unread: vec![],
            gradients_checked: false,
            casts_before: 0,
            stats_every: None,
            stats: CastStats::default(),
            profile: None,
        })
    }

    /// Measures the casts of every step whose number is a multiple of `steps`.
    pub fn measure_every(&mut self, steps: Option<u64>) {
        self.stats_every = steps;
    }

    /// The measurements of the last step; None if it was not measured.
    pub fn take_stats(&self) -> Option<StatsReport> {
        Some(self.stats.take()).filter(|report| !report.rows.is_empty())
    }

    /// Turns on or off the record of where the time of steps goes.
    pub fn measure_times(&mut self, profiles: bool) {
        self.profile = profiles.then(profile::Report::default);
    }

    /// One optimizer step. Its results stay on the device until [`Run::read_steps`].
    pub fn train_step(&mut self, data: &Data) -> Result<()> {
        if self.profile.is_none() {
            return self.unprofiled_step(data);
        }
        let first = !self.gradients_checked;
        let (done, report) = profile::record(|| self.unprofiled_step(data));
        // The first step allocates memory that later ones reuse.
        if let (false, Some(total)) = (first, &mut self.profile) {
            total.add(&report);
        }
        done
    }

    fn unprofiled_step(&mut self, data: &Data) -> Result<()> {
        let Settings {
            seed,
            batch,
            micro_batches,
            ref model,
            ..
        } = self.settings;
        let batch = data.train_batch(seed, self.step, batch, model.context)?;
        let own = self.ranks.own(&batch, micro_batches)?;
        let begin = self.clock.mark()?;
        let measures = (self.stats_every).is_some_and(|n| (self.step + 1).is_multiple_of(n));
        let autocast = |place: u32| {
            let autocast = Autocast::new(self.recipe.clone()?).micro_batch(place);
            let autocast = match self.ranks.is_parallel() {
                true => autocast.reduction_group(Arc::new(self.ranks.group.clone())),
                false => autocast,
            };
            Some(match measures {
                true => autocast.with_stats(&self.stats),
                false => autocast,
            })
        };
        let lr = self.schedule.lr(self.step);
        let step = StepOf {
            micro_batches: &own,
            autocast: &autocast,
            lr,
            check: !self.gradients_checked,
        };
        let (loss, report) = self.weights.step(&self.model, &step)?;
        self.gradients_checked = true;
        let marks = (begin, self.clock.mark()?);
        self.step += 1;
        self.unread.push(Unread {
            step: self.step,
            loss,
            lr,
            report,
            marks,
        });
        Ok(())
    }

    /// The steps since the last call, up to one whose loss is not finite; one copy brings all losses to the host. All ranks call it.
    pub fn read_steps(&mut self) -> Result<Vec<StepRecord>> {
        let mut unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(vec![]);
        }
        let losses: Vec<&Tensor> = unread.iter().map(|step| &step.loss).collect();
        let factor = 1. / self.settings.micro_batches as f32;
        let losses = self
            .ranks
            .sum(&Tensor::stack(&losses, 0)?)?
            .to_vec1::<f32>()?;
        let losses = losses.into_iter().map(|loss| f64::from(loss * factor));
        let mut steps = vec![];
        for (index, loss) in losses.enumerate() {
            if !loss.is_finite() && index > 0 {
                // The steps before it are reported first; the next call fails.
                self.unread = unread.split_off(index);
                break;
            }
            let unread = &unread[index];
            let Unread {
                step, lr, report, ..
            } = unread;
            ensure!(
                loss.is_finite(),
                "{}: the loss of step {step} is {loss}",
                self.name
            );
            let mut record = StepRecord::new(*step, loss);
            record.lr = *lr;
            record.grad_norm = Some(report.grad_norm()?);
            record.ms = unread.marks.0.ms_until(&unread.marks.1)?;
            record.tokens = self.settings.batch * self.settings.model.context;
            steps.push(record);
        }
        Ok(steps)
    }

    /// Whether reading waits for the device.
    pub fn is_asynchronous(&self) -> bool {
        !self.device.is_cpu()
    }

    /// Mean loss with frozen scales.
    pub fn validate(&self, batches: &[Batch]) -> Result<f64> {
        let _guard = self.evaluation_guard()?;
        let losses = batches
            .iter()
            .map(|batch| self.weights.loss(&self.model, batch))
            .collect::<Result<Vec<_>>>()?;
        Ok(scalars(&losses)?.iter().sum::<f64>() / batches.len() as f64)
    }

    /// The guard of validation and generation; None for a high-precision run.
    fn evaluation_guard(&self) -> Result<Option<AutocastGuard>> {
        evaluation(self.recipe.clone())
    }

    /// The guard in which the model computes as the one from its file does without a guard: with attention in high precision.
    pub fn serving_guard(&self) -> Result<Option<AutocastGuard>> {
        let recipe = self.recipe.clone();
        evaluation(recipe.map(|recipe| recipe.with_attention(AttentionProducts::none())))
    }

    /// Runs training batches in high precision and sets static scales from the amaxes.
    pub fn calibrate(&self, data: &Data, batches: u64) -> Result<()> {
        let Some(recipe) = &self.recipe else {
            return Ok(());
        };
        let Settings {
            seed,
            batch,
            ref model,
            ..
        } = self.settings;
        let guard = fp8_autocast(
            Autocast::new(recipe.clone())
                .calibrating(true)
                .training(false),
        )?;
        for i in 0..batches {
            let (inputs, _) =
                data.train_batch(seed, self.settings.steps + i, batch, model.context)?;
            self.model.forward::<Tensor>(&inputs)?;
        }
        guard.close()?;
        Ok(())
    }

    /// Whether the calibrated model and its file give the same logits. They do not if the recipe computes one scale from each input
    /// tensor, because the file stores calibrated scales.
    pub fn keeps_logits(&self) -> Result<bool> {
        let config = self.recipe.as_ref().map(Recipe::resolve).transpose()?;
        Ok(config.is_none_or(|config| {
            let input = config.input;
            !(input.scaling.is_from_tensor() && input.granularity == Granularity::Tensorwise)
        }))
    }

    pub fn quantized_tensors(&self) -> u64 {
        self.casts_before + quantized_tensors(&self.model) + self.weights.scaled_casts()
    }

    pub fn converted_layers(&self) -> usize {
        self.report.as_ref().map_or(0, PrepareReport::converted)
    }

    /// Writes a checkpoint on the first rank. All ranks call it.
    pub fn save(&self, dir: &Path) -> Result<()> {
        if self.ranks.is_parallel() && !self.ranks.is_sharded() {
            gather_state(&self.model, &self.ranks.group)?;
        }
        if !self.ranks.leads() && !self.ranks.is_sharded() {
            return Ok(());
        }
        let place = Place {
            step: self.step,
            quantized_tensors: self.quantized_tensors(),
            settings: serde_json::to_value(&self.settings)?,
        };
        let path = checkpoint_path(dir, &self.name);
        let (model, recipe) = (&self.model, self.recipe.clone());
        (self.weights).save(&path, model, recipe, place, self.settings.seed)
    }

    /// The same run with whole parameters, from the checkpoint that it has just written: for what one rank does alone.
    pub fn whole(&self, dir: &Path) -> Result<Self> {
        let ranks = Ranks::new(&ProcessGroup::single(), None, Travel::default())?;
        let mut whole = Self::new(&self.name, &self.settings, &self.device, &ranks)?;
        whole.recipe.clone_from(&self.recipe);
        whole.resume(dir)?;
        Ok(whole)
    }

    pub fn resume(&mut self, dir: &Path) -> Result<()> {
        let path = checkpoint_path(dir, &self.name);
        if !path.exists() {
            // Stopped before this run's first checkpoint: start over, which gives the same losses.
            return Ok(());
        }
        let fits = |saved: &serde_json::Value| {
            let settings: Settings = serde_json::from_value(saved.clone())
                .with_context(|| format!("{}: not a checkpoint of this example", path.display()))?;
            match settings.difference(&self.settings)? {
                None => Ok(()),
                Some(differs) => bail!("{} is of another run: {differs}", path.display()),
            }
        };
        let (model, recipe) = (&self.model, self.recipe.as_ref());
        let place = self.weights.resume(&path, model, recipe, fits)?;
        self.step = place.step;
        self.casts_before = place.quantized_tensors;
        Ok(())
    }
}

fn evaluation(recipe: Option<Recipe>) -> Result<Option<AutocastGuard>> {
    let autocast = recipe.map(|recipe| Autocast::new(recipe).training(false));
    Ok(autocast.map(fp8_autocast).transpose()?)
}

/// f32 scalars on the host, in one copy.
fn scalars<'a>(values: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<f64>> {
    let values: Vec<&Tensor> = values.into_iter().collect();
    if values.is_empty() {
        return Ok(vec![]);
    }
    let values = Tensor::stack(&values, 0)?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f64::from).collect())
}

fn checkpoint_path(dir: &Path, name: &str) -> PathBuf {
    checkpoints(dir).join(format!("{name}.safetensors"))
}
