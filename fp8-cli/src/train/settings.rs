//! The settings with which a run begins. The run's folder stores them, so `--resume` needs nothing else.

use crate::card::Card;
use crate::device::DeviceName;
use crate::usage::{Usage, at_least, number, steps};
use anyhow::{Result, ensure};
use candle_core::DType;
use fp8::config::CastRounding;
use fp8::fp8_core::did_you_mean;
use fp8::optim::{AdamWConfig, DecayScope, LrSchedule};
use fp8::training::{DatasetOptions, TrainerConfig, Validation};
use fp8::{Fp8LinearConfig, PrepareOptions, Recipe, RecipeName};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The name of high precision among recipes.
const F32: &str = "f32";
/// The temperature of queries, as most libraries have it.
const TEMPERATURE: f64 = 0.05;
/// Tokens of a row, if the model has as many positions.
pub const CONTEXT: usize = 512;
/// What a positive number is in messages.
const POSITIVE: &str = "a number above 0";

fn positive(number: f64) -> bool {
    number > 0. && number.is_finite()
}

/// A name among several that commas separate; people put blanks after commas.
fn name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("expected a name before and after each comma".into()),
        name => Ok(name.to_string()),
    }
}

/// The recipe of runs that name none.
const DEFAULT: &str = "delayed";

#[derive(Debug, Clone, Serialize, Deserialize, clap::Args)]
pub struct Settings {
    /// For a language model text files, JSON lines (`text`, `messages`, or `prompt` and `completion`) or folders of text files; for an
    /// encoder JSON lines of `text` and `label`, or of `query`, `positive` and, if there is one, `negative`
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "resume")]
    pub data: Vec<PathBuf>,
    /// Files to validate on [default: a twentieth of the data]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub validation: Vec<PathBuf>,
    /// What the run computes on
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub device: DeviceName,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = steps, allow_negative_numbers = true)]
    pub steps: u64,
    /// Rows of a step; for queries, the number of queries, each of which chooses among the texts of all
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least(1), allow_negative_numbers = true)]
    pub batch: usize,
    /// Tokens of a row [default: 512, or the model's positions if it has fewer]
    #[arg(long, value_name = "N", value_parser = at_least(2), allow_negative_numbers = true)]
    pub context: Option<usize>,
    /// Parts of a step's rows whose gradients are computed one after the other: less memory
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least(1), allow_negative_numbers = true)]
    pub micro_batches: usize,
    /// How linear layers compute: f32, or an FP8 recipe such as delayed, tensorwise, rowwise, current, blockwise or mxfp8 [default:
    /// delayed; with --lora, as the model's file says]
    #[arg(long, value_name = "RECIPE", conflicts_with = "lora")]
    pub recipe: Option<String>,
    /// Another recipe, or f32, for the layers whose path matches: PATTERN=RECIPE
    #[arg(long, value_name = "PATTERN=RECIPE", conflicts_with = "lora")]
    pub layer: Vec<String>,
    /// Train the last N steps in high precision, in which the written model is then better
    #[arg(long, value_name = "N", conflicts_with = "lora", value_parser = steps, allow_negative_numbers = true)]
    pub finish: Option<u64>,
    /// How recipes round weights to FP8: to the nearest code, or stochastically, so that the written model is better in high precision
    #[arg(
        long,
        value_name = "ROUNDING",
        value_enum,
        default_value_t,
        conflicts_with = "lora"
    )]
    #[serde(default)]
    pub weight_rounding: WeightRounding,
    /// Dtype to which training rounds the operands of products that no recipe casts (attention, a language model's head)
    /// [default: bf16 if layers compute in FP8 and the device multiplies bf16, else f32]
    #[arg(long, value_enum)]
    pub operands: Option<Operands>,
    /// The highest learning rate [default: 2e-5, and 2e-4 with --lora]
    #[arg(long, value_name = "X", value_parser = number(POSITIVE, positive), allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// How the learning rate changes after the warm-up
    #[arg(long, value_enum, default_value_t = Schedule::Cosine)]
    pub schedule: Schedule,
    /// Steps in which the learning rate rises [default: a twentieth of all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub warmup: Option<u64>,
    /// Weight decay of matrices; biases and norms do not decay
    #[arg(long, value_name = "X", default_value_t = 0., value_parser = number("a number of at least 0", |x| x >= 0. && x.is_finite()),
          allow_negative_numbers = true)]
    pub weight_decay: f64,
    /// The norm that gradients are clipped to
    #[arg(long, value_name = "X", default_value_t = 1., value_parser = number(POSITIVE, positive), allow_negative_numbers = true)]
    pub max_grad_norm: f64,
    /// Seed of the order of the data and of new parameters
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Start a new row for each document
    #[arg(long)]
    pub no_packing: bool,
    /// Recompute the layers in the backward pass instead of keeping what they have computed: less memory, the same results
    #[arg(long)]
    pub recompute: bool,
    /// Train adapters of this rank beside the frozen model instead of its weights
    #[arg(long, value_name = "RANK", value_parser = at_least(1), allow_negative_numbers = true)]
    pub lora: Option<usize>,
    /// Weight of the adapters, which is divided by their rank [default: twice the rank]
    #[arg(long, value_name = "X", requires = "lora", value_parser = number(POSITIVE, positive), allow_negative_numbers = true)]
    pub alpha: Option<f64>,
    /// The layers that get adapters: names that end their paths, separated by commas, or all-linear [default: q_proj,v_proj; query,value in
    /// an encoder]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = name, requires = "lora")]
    pub target: Option<Vec<String>>,
    /// Share of an adapter's inputs that dropout zeroes in training
    #[arg(long, value_name = "P", requires = "lora", value_parser = number("a share of at least 0 and below 1", |x| (0. ..1.).contains(&x)),
          allow_negative_numbers = true)]
    pub dropout: Option<f64>,
    /// For queries: what the cosines of embeddings are divided by
    #[arg(long, value_name = "X", default_value_t = TEMPERATURE, value_parser = number(POSITIVE, positive), allow_negative_numbers = true)]
    pub temperature: f64,
    #[command(flatten)]
    pub card: Card,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = steps, allow_negative_numbers = true)]
    pub checkpoint_every: u64,
    /// Steps between two validations [default: a tenth of all]
    #[arg(long, value_name = "N", value_parser = steps, allow_negative_numbers = true)]
    pub validate_every: Option<u64>,
    /// Measure every cast of each Nth step, and write stats.jsonl
    #[arg(long, value_name = "N", conflicts_with = "lora", value_parser = steps, allow_negative_numbers = true)]
    pub stats: Option<u64>,
}

/// What `run.json` stores.
#[derive(Serialize, Deserialize)]
pub struct Stored {
    pub model: PathBuf,
    /// The command line that began it.
    pub command: String,
    #[serde(flatten)]
    pub settings: Settings,
}

/// Operands of products in high precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Operands {
    F32,
    Bf16,
}

impl Operands {
    /// As models take it.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(DType::BF16),
        }
    }
}

/// How recipes round weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum WeightRounding {
    #[default]
    Nearest,
    Stochastic,
}

impl WeightRounding {
    pub fn is_nearest(&self) -> bool {
        *self == Self::Nearest
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    Cosine,
    Constant,
}

impl Settings {
    /// The name of the run in metrics.
    pub fn name(&self) -> &str {
        match self.lora {
            Some(_) => "lora",
            None => self.recipe.as_deref().unwrap_or(DEFAULT),
        }
    }

    /// Tokens of a row.
    pub fn context(&self) -> usize {
        self.context.unwrap_or(CONTEXT)
    }

    /// The dtype that operands of products in high precision are rounded to; None for that of the tensors.
    pub fn operands(&self) -> Option<DType> {
        self.operands.and_then(Operands::dtype)
    }

    /// Whether it trains a model in full under an FP8 recipe.
    pub fn trains_in_fp8(&self) -> bool {
        self.lora.is_none() && self.name() != F32
    }

    /// The temperature of queries, if it is not that of runs that name none.
    pub fn own_temperature(&self) -> Option<f64> {
        Some(self.temperature).filter(|own| *own != TEMPERATURE)
    }

    /// The data as `fp8::training` takes it.
    pub fn dataset(&self) -> DatasetOptions {
        let options = DatasetOptions::new(self.context())
            .with_packing(!self.no_packing)
            .with_seed(self.seed);
        match self.validation.is_empty() {
            true => options,
            false => options.with_validation(Validation::Files(self.validation.clone())),
        }
    }

    /// The trainer's settings.
    pub fn trainer(&self) -> Result<TrainerConfig> {
        ensure!(
            self.batch >= self.micro_batches,
            Usage(format!(
                "--micro-batches is {}, but a step has {} rows",
                self.micro_batches, self.batch
            ))
        );
        let lr = self.lr.unwrap_or(match self.lora {
            Some(_) => 2e-4,
            None => 2e-5,
        });
        ensure!(
            self.warmup.is_none_or(|warmup| warmup <= self.steps),
            Usage(format!(
                "--warmup is {}, but the run has {} steps",
                self.warmup.unwrap_or_default(),
                self.steps
            ))
        );
        ensure!(
            self.finish.is_none_or(|last| last < self.steps),
            Usage(format!(
                "--finish is {}, but the run has {} steps: expected fewer",
                self.finish.unwrap_or_default(),
                self.steps
            ))
        );
        let warmup_steps = self.warmup.unwrap_or(self.steps / 20);
        let schedule = match self.schedule {
            Schedule::Cosine => LrSchedule::cosine(lr, warmup_steps, self.steps),
            Schedule::Constant => LrSchedule::Constant { lr, warmup_steps },
        };
        let optimizer = AdamWConfig {
            lr,
            weight_decay: self.weight_decay,
            decay_scope: DecayScope::Matrices,
            max_grad_norm: Some(self.max_grad_norm),
            ..AdamWConfig::default()
        };
        let recipe = self.named()?;
        let prepare = match &recipe {
            Some(recipe) => Some(self.prepare(recipe)?),
            None => None,
        };
        let config = TrainerConfig::new(schedule)
            .with_optimizer(optimizer)
            .with_recipe(recipe)
            .with_last_recipe_step(self.finish.map(|last| self.steps - last))
            .with_prepare(prepare)
            .with_micro_batches(self.micro_batches)
            .with_stats_every(self.stats)
            .with_settings(serde_json::to_value(Fixed::of(self))?);
        Ok(config)
    }

    /// The recipe of the guard. With adapters the base computes by the scheme of its file, without a guard.
    fn named(&self) -> Result<Option<Recipe>> {
        if self.lora.is_none() && self.name() == F32 {
            let without = "takes a recipe, and --recipe is f32";
            let given = [
                ("--layer", !self.layer.is_empty()),
                ("--finish", self.finish.is_some()),
                ("--weight-rounding", !self.weight_rounding.is_nearest()),
                ("--stats", self.stats.is_some()),
            ];
            if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(Usage(format!("{flag} {without}")).into());
            }
        }
        match self.lora {
            Some(_) => Ok(None),
            None => self.recipe("--recipe", self.name()),
        }
    }

    /// Which layers the recipe of the run holds for, and its operators if it casts them.
    fn prepare(&self, recipe: &Recipe) -> Result<PrepareOptions> {
        let operators = recipe.resolve()?.cast_operators;
        let mut options = PrepareOptions::default().with_operators(operators);
        for rule in &self.layer {
            let Some((pattern, name)) = rule.rsplit_once('=') else {
                let expected = "expected PATTERN=RECIPE";
                return Err(Usage(format!("--layer is {rule}: {expected}")).into());
            };
            options = match self.recipe("--layer", name)? {
                Some(recipe) => options.with_recipe(pattern, recipe)?,
                None => options.with_off(pattern)?,
            };
        }
        Ok(options)
    }

    /// The recipe of this name as the run has it; None for high precision.
    fn recipe(&self, flag: &str, name: &str) -> Result<Option<Recipe>> {
        let Some(name) = recipe_name(flag, name)? else {
            return Ok(None);
        };
        let config = Fp8LinearConfig::from_recipe_name(name);
        Ok(Some(Recipe::from(match self.weight_rounding {
            WeightRounding::Nearest => config,
            WeightRounding::Stochastic => config
                .with_weight_rounding(CastRounding::Stochastic)
                .with_seed(self.seed),
        })))
    }
}

/// None for high precision.
fn recipe_name(flag: &str, name: &str) -> Result<Option<RecipeName>> {
    if name == F32 {
        return Ok(None);
    }
    let found: Result<RecipeName, _> = name.parse();
    let found = found.map_err(|_| {
        let names: Vec<&str> = std::iter::once(F32)
            .chain(RecipeName::ALL.map(RecipeName::as_str))
            .collect();
        let meant = did_you_mean(name, names.iter().copied());
        Usage(format!(
            "{flag} is {name}: expected one of {}{meant}",
            names.join(", ")
        ))
    })?;
    Ok(Some(found))
}

/// What a resumed run must agree with, besides what the trainer compares itself.
#[derive(Serialize)]
struct Fixed<'a> {
    steps: u64,
    recipe: &'a str,
    layer: &'a [String],
    lora: Option<usize>,
    alpha: Option<f64>,
    target: Option<&'a [String]>,
    dropout: Option<f32>,
    seed: u64,
    /// Runs of earlier versions have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    operands: Option<Operands>,
    #[serde(skip_serializing_if = "WeightRounding::is_nearest")]
    weight_rounding: WeightRounding,
}

impl<'a> Fixed<'a> {
    fn of(settings: &'a Settings) -> Self {
        Self {
            steps: settings.steps,
            recipe: settings.name(),
            layer: &settings.layer,
            lora: settings.lora,
            alpha: settings.alpha,
            target: settings.target.as_deref(),
            dropout: settings.dropout.map(|share| share as f32),
            seed: settings.seed,
            operands: settings.operands,
            weight_rounding: settings.weight_rounding,
        }
    }
}

#[cfg(test)]
mod tests;
