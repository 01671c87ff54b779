//! `fp8 train`: fine-tunes a model, in full or by adapters.

mod outcome;
mod settings;
mod watch;

use crate::model::Source;
use crate::usage::Usage;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_files::adapter::{AdapterConfig, Targets};
use fp8::models::{Model, ModelOptions, open};
use fp8::training::{
    Dataset, Ended, Learner, Metrics, NextToken, RunFolder, Stop, TrainableModel, Trainer,
    TurnOptions, initialize_adapter, train,
};
use outcome::Finished;
use serde::{Deserialize, Serialize};
use settings::Settings;
use std::path::PathBuf;
use watch::Watch;

/// The name of a run's adapter.
const ADAPTER: &str = "default";

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, in FP8 or in high precision, or a GGUF file
    #[arg(required_unless_present = "resume")]
    model: Option<PathBuf>,
    /// The folder to write
    #[arg(long, value_name = "DIR", required_unless_present = "resume")]
    out: Option<PathBuf>,
    /// Replace the run in that folder
    #[arg(long)]
    overwrite: bool,
    /// Go on with the run in this folder, with its settings
    #[arg(long, value_name = "DIR", exclusive = true)]
    resume: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

/// What `run.json` stores.
#[derive(Serialize, Deserialize)]
struct Stored {
    model: PathBuf,
    #[serde(flatten)]
    settings: Settings,
}

/// A run that is ready to begin.
struct Run {
    stored: Stored,
    folder: RunFolder,
    /// The file of a model that is trained in full.
    source: Option<Box<dyn fp8::rewrite::Source>>,
    trainer: Trainer<Model, NextToken>,
}

pub fn run(args: &Args) -> Result<()> {
    let (stored, folder) = match &args.resume {
        Some(dir) => {
            let folder = RunFolder::open(dir)?;
            (folder.settings::<Stored>()?, Some(folder))
        }
        None => (stored(args)?, None),
    };
    // Everything that can be wrong with arguments, data and model is found before a folder is made.
    let (settings, name) = (&stored.settings, stored.settings.name());
    let config = settings.trainer()?;
    let tokenizer = Source::of(&stored.model).tokenizer()?;
    let data = Dataset::open(&settings.data, &tokenizer, &settings.dataset())?;
    let described = data.description();
    let objective = NextToken::new(data, settings.batch)?.with_dropout_seed(settings.seed);
    let (model, vars, source) = model(&stored)?;
    if let Some(positions) = model
        .max_positions()
        .filter(|&most| most < settings.context)
    {
        let context = settings.context;
        bail!(Usage(format!(
            "--context is {context}, and the model has {positions} positions"
        )));
    }
    let trainer = Trainer::new(name, model, vars, objective, config)?;
    let resumes = folder.is_some();
    let folder = match (folder, &args.out) {
        (Some(folder), _) => folder,
        (None, Some(out)) => RunFolder::create(out, &stored, args.overwrite)?,
        (None, None) => bail!("--out is missing"),
    };
    println!("data: {described}");
    let trainer = trainer.with_checkpoint(folder.checkpoint(name));
    let mut run = Run {
        stored,
        folder,
        source,
        trainer,
    };
    if resumes && run.trainer.resume()? {
        println!("going on after step {}", run.trainer.step());
    }
    run.describe();
    run.train()
}

/// The settings of a new run. Paths are stored in full: a run may be resumed from elsewhere.
fn stored(args: &Args) -> Result<Stored> {
    let full =
        |path: &PathBuf| std::path::absolute(path).with_context(|| path.display().to_string());
    let Some(model) = &args.model else {
        bail!(Usage("a model is missing".into()));
    };
    let mut settings = args.settings.clone();
    for path in settings.data.iter_mut().chain(&mut settings.validation) {
        *path = full(path)?;
    }
    Ok(Stored {
        model: full(model)?,
        settings,
    })
}

type Opened = (Model, VarMap, Option<Box<dyn fp8::rewrite::Source>>);

/// The model with its variables: its parameters, or those of adapters.
fn model(stored: &Stored) -> Result<Opened> {
    let settings = &stored.settings;
    let (mut model, vars, source) = match settings.lora {
        None => {
            let base = TrainableModel::open(&stored.model, DType::F32, &Device::Cpu)?;
            (base.model, base.vars, Some(base.source))
        }
        Some(rank) => {
            let mut model = open(&stored.model, &ModelOptions::new())?;
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let targets = match settings.target.as_deref() {
                None => Targets::names(["q_proj", "v_proj"]),
                Some([all]) if all == "all-linear" => Targets::AllLinear,
                Some(names) => Targets::names(names.iter().map(String::as_str)),
            };
            let mut config = AdapterConfig::new(rank)
                .with_alpha(settings.alpha.unwrap_or(2. * rank as f64))
                .with_targets(targets);
            config.dropout = settings.dropout.unwrap_or(0.);
            config.base_model = Some(stored.model.display().to_string());
            model.add_adapter(ADAPTER, &config, vb)?;
            initialize_adapter(&vars, settings.seed)?;
            (model, vars, None)
        }
    };
    match &mut model {
        Model::Llama(llama) => llama.set_recomputation(settings.recompute),
        _ => bail!("{} is not a language model", stored.model.display()),
    }
    Ok((model, vars, source))
}

impl Run {
    fn describe(&self) {
        let vars = self.trainer.vars().all_vars();
        let trained: usize = vars.iter().map(|var| var.elem_count()).sum();
        println!("trains {:.3} million parameters", trained as f64 / 1e6);
        if let Some(report) = self.trainer.report() {
            println!("{report}");
        }
    }

    fn train(mut self) -> Result<()> {
        let settings = &self.stored.settings;
        let stop = Stop::default();
        let asked = stop.clone();
        ctrlc::set_handler(move || {
            if asked.request() {
                // A second Ctrl-C ends the program at once; files are replaced atomically, so none is left half-written.
                std::process::exit(130);
            }
        })?;
        let options =
            TurnOptions::new(settings.steps).with_checkpoint_every(Some(settings.checkpoint_every));
        let options = match settings.validate_every {
            Some(steps) => options.with_validate_every(Some(steps)),
            None => options,
        };
        let name = settings.name();
        let done = self.trainer.step();
        let mut metrics = self.folder.metrics(name, done)?;
        if metrics.validation_curve(name).is_empty()
            && done == 0
            && let Some(loss) = self.trainer.validate()?
        {
            println!(
                "before training: validation {loss:.4} (perplexity {:.3})",
                loss.exp()
            );
            metrics.push_validation(name, 0, loss)?;
        }
        let mut watch = Watch::new(&self.folder, done, settings.steps, &stop)?;
        let learners = std::slice::from_mut(&mut self.trainer);
        let ended = train(learners, &options, &mut metrics, &mut watch, &stop)?;
        watch.end()?;
        match ended {
            Ended::Finished => self.finish(&mut metrics),
            Ended::Stopped => {
                let dir = self.folder.path().display();
                println!("stopped; go on with `fp8 train --resume {dir}`");
                Ok(())
            }
        }
    }

    fn finish(mut self, metrics: &mut Metrics) -> Result<()> {
        let finished = Finished {
            model: &self.stored.model,
            settings: &self.stored.settings,
            folder: &self.folder,
            source: self.source.as_deref(),
            adapter: ADAPTER,
            trainer: &mut self.trainer,
        };
        finished.write(metrics)
    }
}
