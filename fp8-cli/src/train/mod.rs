//! `fp8 train`: fine-tunes a model, in full or by adapters.

mod goal;
mod layers;
mod outcome;
mod settings;
mod trained;

use crate::card::{Asked, command};
use crate::model::Source;
use crate::output::{print, separate, size};
use crate::source::found;
use crate::texts::trained_length;
use crate::usage::{Interrupted, Usage};
use crate::watch::{Look, Watch};
use anyhow::{Context, Result, anyhow, bail};
use fp8::memory_in_use;
use fp8::models::gguf::is_gguf;
use fp8::models::{Model, open_config};
use fp8::training::{Ended, Error, Learner, Metrics, RunFolder, Task, Trainer, TurnOptions, train};
use goal::{Goal, Lesson, judged};
use outcome::Finished;
use settings::{CONTEXT, Settings, Stored};
use std::path::{Path, PathBuf};
use trained::{ADAPTER, model, operands};

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, in FP8 or in high precision, or a GGUF file
    model: Option<PathBuf>,
    /// The folder to write
    #[arg(long, value_name = "DIR", required_unless_present = "resume")]
    out: Option<PathBuf>,
    /// Replace the run in that folder
    #[arg(long)]
    overwrite: bool,
    /// Continue the run in this folder, with its settings
    #[arg(long, value_name = "DIR", exclusive = true)]
    resume: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

/// A run that is ready to begin.
struct Run {
    stored: Stored,
    folder: RunFolder,
    /// The file of a model that is trained in full.
    source: Option<Box<dyn fp8::rewrite::Source>>,
    trainer: Trainer<Model, Goal>,
    task: Task,
    labels: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let (mut stored, folder) = match &args.resume {
        Some(dir) => {
            let folder = RunFolder::open(dir)?;
            (folder.settings::<Stored>()?, Some(folder))
        }
        None => (stored(args)?, None),
    };
    // All checks of arguments, data and model come before a folder is made.
    let settings = &stored.settings;
    settings.card.check(&Source::of(&stored.model))?;
    // For its errors: the operands, which are a setting too, depend on the model.
    settings.trainer()?;
    let tokenizer = Source::of(&stored.model).tokenizer()?;
    let lesson = Lesson::new(settings, &stored.model, &tokenizer)?;
    let warnings = lesson.warnings(settings);
    let Lesson {
        goal,
        task,
        labels,
        described,
        ..
    } = lesson;
    let (model, vars, source) = model(&stored, &labels)?;
    if folder.is_none() {
        stored.settings.operands = Some(operands(&stored.settings, &model)?);
    }
    let name = stored.settings.name();
    let trainer = Trainer::new(name, model, vars, goal, stored.settings.trainer()?)?;
    let unmatched = trainer.report().and_then(|report| report.unmatched.first());
    if let Some(unmatched) = unmatched {
        return Err(Usage(format!("--layer: {unmatched}")).into());
    }
    let resumed = folder.is_some();
    let folder = match (folder, &args.out) {
        (Some(folder), _) => folder,
        (None, Some(out)) => begin(out, &stored, args.overwrite)?,
        (None, None) => bail!("--out is missing"),
    };
    let trainer = trainer.with_checkpoint(folder.checkpoint(name));
    let mut run = Run {
        stored,
        folder,
        source,
        trainer,
        task,
        labels,
    };
    let continues = resumed && run.trainer.resume()?;
    if continues && run.is_finished() {
        let (steps, path) = (run.trainer.step(), run.folder.path().display());
        return print(&format!(
            "{path} is already finished: {steps} of {steps} steps\n"
        ));
    }
    let context = run.stored.settings.context();
    if args.settings.context.is_none() && context < CONTEXT && !resumed {
        let why = match trained_length(&run.stored.model)? == Some(context) {
            true => "sentence_bert_config.json says",
            false => "the model has no more positions",
        };
        print(&format!("--context is {context}, as {why}\n"))?;
    }
    print(&format!("data: {described}\n"))?;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    match (resumed, continues) {
        (_, true) => print(&format!("continuing after step {}\n", run.trainer.step()))?,
        (true, false) => print("no checkpoint was written yet: beginning again at step 0\n")?,
        (false, false) => run.describe()?,
    }
    run.train()
}

/// Fails for a folder that holds a model or an adapter of its own, among whose files those of a run would lie.
fn holds_no_model(out: &Path) -> Result<()> {
    let is_model = |name: &str| {
        let files = ["config.json", "adapter_config.json"];
        files.contains(&name) || name.ends_with(".safetensors") || name.ends_with(".gguf")
    };
    // What is no folder, or cannot be read, fails when the run is made.
    let names = (std::fs::read_dir(out).into_iter().flatten())
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    match names.filter(|name| is_model(name)).min() {
        None => Ok(()),
        Some(name) => bail!(
            "--out: {} holds a model ({name}), but a run needs its own folder: choose another --out",
            out.display()
        ),
    }
}

/// The folder of a new run.
fn begin(out: &Path, stored: &Stored, overwrite: bool) -> Result<RunFolder> {
    holds_no_model(out)?;
    RunFolder::create(out, stored, overwrite).map_err(|error| match error {
        Error::RunExists { path } => {
            let path = path.display();
            anyhow!(
                "{path} holds an earlier run: continue it with `fp8 train --resume {path}`, replace it with --overwrite, or choose \
                 another --out"
            )
        }
        other => other.into(),
    })
}

/// The settings of a new run. Paths are stored in full: a run may be resumed from elsewhere.
fn stored(args: &Args) -> Result<Stored> {
    let full =
        |path: &PathBuf| std::path::absolute(path).with_context(|| path.display().to_string());
    let Some(model) = &args.model else {
        return Err(Usage(without_model(&args.settings)).into());
    };
    found(model)?;
    let mut settings = args.settings.clone();
    if let Some(out) = &args.out {
        let texts = settings.data.iter().chain(&settings.validation);
        let read = texts.chain(&settings.card.eval).chain([model]);
        separate(out, read.map(PathBuf::as_path))?;
    }
    settings.context = Some(context(settings.context, model)?);
    let texts = settings.data.iter_mut().chain(&mut settings.validation);
    for path in texts.chain(&mut settings.card.eval) {
        *path = full(path)?;
    }
    Ok(Stored {
        model: full(model)?,
        command: command(),
        settings,
    })
}

/// The message for a command line without a model. A flag that takes several files takes a model behind them too.
fn without_model(settings: &Settings) -> String {
    let taken = [
        ("--data", &settings.data),
        ("--validation", &settings.validation),
    ];
    let taken = taken.into_iter().find_map(|(flag, files)| {
        let model = files.last().filter(|path| is_model(path))?;
        Some((flag, model))
    });
    let hint = taken.map_or(String::new(), |(flag, path)| {
        let path = path.display();
        format!(": {flag} takes all paths that follow it, {path} too. Put the model first")
    });
    format!("a model is missing, as in `fp8 train MODEL --data FILE --out DIR`{hint}")
}

/// Whether a path is that of a model, and not of data.
fn is_model(path: &Path) -> bool {
    is_gguf(path) || path.join("config.json").is_file()
}

/// Tokens of a row: as many as were asked for, or as many as the model has positions, or as sentence-transformers read, if these are few.
fn context(asked: Option<usize>, model: &Path) -> Result<usize> {
    let positions = open_config(model)?.max_positions();
    let few = trained_length(model)?;
    match (asked, positions) {
        (Some(asked), Some(most)) if asked > most => {
            let way = format!("pass --context {most} or less");
            let text = format!("--context is {asked}, and the model has {most} positions: {way}");
            Err(Usage(text).into())
        }
        (None, Some(most)) => Ok(CONTEXT.min(most).min(few.unwrap_or(most))),
        _ => Ok(asked.unwrap_or(CONTEXT)),
    }
}

impl Run {
    /// Whether its last step was made and its results were written.
    fn is_finished(&self) -> bool {
        self.trainer.step() >= self.stored.settings.steps && self.folder.is_finished()
    }

    fn describe(&self) -> Result<()> {
        let vars = self.trainer.vars().all_vars();
        let trained: usize = vars.iter().map(|var| var.elem_count()).sum();
        let mut text = format!("trains {:.3} million parameters\n", trained as f64 / 1e6);
        if let Some(report) = self.trainer.report() {
            text += &layers::described(report, self.stored.settings.name());
            text += "\n";
        }
        if !self.stored.settings.weight_rounding.is_nearest() {
            text += "weights are rounded to FP8 at random\n";
        }
        if let Some(last) = self.stored.settings.finish {
            let rounded = match self.stored.settings.operands() {
                Some(_) => ", with operands of bf16",
                None => "",
            };
            text += &format!("the last {last} steps compute in high precision{rounded}\n");
        }
        print(&text)
    }

    fn train(mut self) -> Result<()> {
        let settings = &self.stored.settings;
        let options =
            TurnOptions::new(settings.steps).with_checkpoint_every(Some(settings.checkpoint_every));
        let options = match settings.validate_every {
            Some(steps) => options.with_validate_every(Some(steps)),
            None => options,
        };
        let name = settings.name();
        let done = self.trainer.step();
        let mut metrics = self.folder.metrics(name, done)?;
        if done == 0 {
            let before = match metrics.validation_curve(name).first() {
                Some(&(_, loss)) => Some((loss, metrics.last_accuracy(name))),
                None => {
                    let loss = self.trainer.validate_high_precision()?;
                    let accuracy = self.trainer.accuracy();
                    if let Some(loss) = loss {
                        metrics.push_validation(name, 0, loss, accuracy)?;
                    }
                    loss.map(|loss| (loss, accuracy))
                }
            };
            if let Some((loss, accuracy)) = before {
                let judged = judged(self.task, loss, accuracy);
                print(&format!("before training: validation {judged}\n"))?;
            }
        }
        // Only now: the figures before and after training are those of the model as it is.
        let operands = settings.operands();
        self.trainer.model_mut().set_operands(operands);
        let task = self.task;
        let judged = move |loss, accuracy| judged(task, loss, accuracy);
        let mut watch = Watch::new(Look {
            steps: settings.steps,
            done,
            leads: true,
            alone: true,
            named: false,
            stats: self.folder.stats(),
            judged: &judged,
            note: memory,
        })?;
        let (stop, requests) = (watch.stop(), watch.requests());
        let asked = || requests.get().copied();
        let learners = std::slice::from_mut(&mut self.trainer);
        let ended = train(learners, &options, &mut metrics, &mut watch, &stop)?;
        watch.end()?;
        let dir = self.folder.path().display().to_string();
        let done = match (ended, asked()) {
            (Ended::Finished, _) => self.finish(&mut metrics, &asked),
            // Whatever would follow the run in a script has nothing to work on yet.
            (Ended::Stopped, Some(request)) => Err(Interrupted(request).into()),
            (Ended::Stopped, None) => Err(anyhow!("stopped")),
        };
        if ended == Ended::Stopped || done.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
            print(&format!(
                "stopped; continue with `fp8 train --resume {dir}`\n"
            ))?;
        }
        done
    }

    fn finish(mut self, metrics: &mut Metrics, asked: Asked<'_>) -> Result<()> {
        let finished = Finished {
            model: &self.stored.model,
            command: &self.stored.command,
            settings: &self.stored.settings,
            folder: &self.folder,
            source: self.source.as_deref(),
            adapter: ADAPTER,
            trained: metrics.mean_train_loss(self.stored.settings.name()),
            task: self.task,
            labels: &self.labels,
            trainer: &mut self.trainer,
            asked,
        };
        finished.write(metrics)
    }
}

fn memory() -> String {
    memory_in_use().map_or(String::new(), |used| format!(", {}", size(used.resident)))
}
