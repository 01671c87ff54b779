//! Trains a small GPT on real text with FP8 recipes and in f32 side by side, then calibrates, saves and reloads the
//! FP8 model and lets it write.
//!
//! `cargo run --release --example train_gpt`

mod bytes;
#[path = "../shared/candle_sources.rs"]
mod candle_sources;
mod choice;
#[path = "../shared/clock.rs"]
mod clock;
mod data;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/flags.rs"]
mod flags;
#[path = "../gpt/mod.rs"]
mod gpt;
mod outcome;
#[path = "../shared/parameters.rs"]
mod parameters;
mod ranks;
mod record;
#[path = "../shared/requests.rs"]
mod requests;
mod run;
#[allow(dead_code, reason = "generate uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;
mod settings;
mod sharded;
mod size;
mod training;
#[allow(dead_code, reason = "generate uses the rest")]
#[path = "../shared/vocabulary.rs"]
mod vocabulary;
#[allow(dead_code, reason = "fp8 train uses the rest")]
#[path = "../shared/watch.rs"]
mod watch;
mod weights;

use anyhow::{Result, anyhow, bail, ensure};
use choice::AUTO;
use clap::Parser;
use data::Data;
use end::{end, one_line};
use flags::Flags;
use fp8::optim::MomentStorage;
use fp8::ranks::{World, WorldOptions};
use fp8::training::{Line, Metrics, trim_stats};
use gpt::Activations;
use gpt::GptConfig;
use gpt::attention::Operands;
use ranks::{Parallel, Ranks, Travel};
use record::STATS;
use requests::Request;
use run::Run;
use settings::{Kept, Moments, Settings, saved_settings};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Train a small GPT with FP8 recipes and in f32 side by side.
#[derive(Parser)]
struct Args {
    /// What to train, separated by commas: f32, bf16, auto (delayed in the layers that it makes faster on this machine), tensorwise, rowwise,
    /// rowwise_with_gw_hp, delayed, current, blockwise, mxfp8, scaled_fp16, scaled_fp8 [default: f32,delayed]
    #[arg(long, value_delimiter = ',')]
    recipe: Option<Vec<String>>,
    /// Optimizer steps of each run [default: 200]
    #[arg(long)]
    steps: Option<u64>,
    /// Seed of weights and batches [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Sequences per batch [default: 8]
    #[arg(long)]
    batch: Option<usize>,
    /// Divide each batch into so many parts with gradients of their own [default: one for each rank]
    #[arg(long)]
    micro_batches: Option<usize>,
    /// What the ranks of a job divide among them; start them with `mpirun -n N` and build with `--features mpi`
    #[arg(long)]
    parallel: Option<Parallel>,
    /// How gradients travel between ranks
    #[arg(long, default_value = "f32")]
    gradients: Travel,
    /// How the optimizer keeps its moments: 8 bytes for each parameter, or about 2 [default: f32]
    #[arg(long)]
    moments: Option<Moments>,
    /// With FP8 recipes, how blocks keep what their backward pass reads besides the codes of products [default: f32]
    #[arg(long)]
    kept: Option<Kept>,
    /// Features of a token, an even number for each head [default: 256]
    #[arg(long)]
    hidden: Option<usize>,
    /// Transformer blocks [default: 4]
    #[arg(long)]
    layers: Option<usize>,
    /// Heads of attention in each block [default: 4]
    #[arg(long)]
    heads: Option<usize>,
    /// Tokens of a sequence, and the window of attention [default: 128]
    #[arg(long)]
    context: Option<usize>,
    /// Tokens: the bytes, and beyond 256 the most frequent pairs of tokens in the training text. Losses are per token and compare
    /// for one --vocab only [default: 256]
    #[arg(long)]
    vocab: Option<usize>,
    /// Operands of attention's products: f32 (tensors as they are), rounded to bf16 (faster on GPUs and on processors with bf16 units), or
    /// cast to FP8, which with an FP8 recipe keeps half as much for the backward pass. The saved model stores the choice [default: bf16 with
    /// an FP8 recipe, else f32]
    #[arg(long)]
    attention: Option<Operands>,
    /// With FP8 recipes, what blocks compute on besides their products. The saved model stores the choice [default: f32]
    #[arg(long)]
    activations: Option<Activations>,
    /// A text file or a folder of them [default: the sources of candle-core]
    #[arg(long)]
    data: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
    /// Resume the run in this folder
    #[arg(long, conflicts_with_all = ["out", "overwrite"])]
    resume: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 100)]
    checkpoint_every: u64,
    /// Measure every cast of each Nth step, which takes longer: prints a table and writes lines to stats.jsonl
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    stats: Option<u64>,
    /// With FP8 recipes, recompute inner tensors in the backward pass instead of keeping them. The results are the same
    #[arg(long)]
    recompute: bool,
    /// Print where the time of the calling thread went in a step; on a GPU that is the time of the host only
    #[arg(long)]
    profile: bool,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    match job(&Args::parse()) {
        // Whatever follows in a script has nothing to work on yet.
        Ok(Some(request)) => ExitCode::from(request.code()),
        done => end(done.map(drop)),
    }
}

/// The request of the system that has stopped the runs, if one has.
fn job(args: &Args) -> Result<Option<Request>> {
    let world = World::join(WorldOptions::default())?;
    let ranks = Ranks::new(world.group(), args.parallel, args.gradients);
    let done = ranks.and_then(|ranks| example(args, &ranks));
    // A rank that fails says so itself, before the others end too.
    world.finish_with(done.map_err(|error| anyhow!(one_line(&error))))
}

fn example(args: &Args, ranks: &Ranks) -> Result<Option<Request>> {
    let device = args.flags.device.open()?;
    let mut settings = match &args.resume {
        Some(dir) => saved_settings(dir)?,
        None => Settings::default(),
    };
    if args.resume.is_none() {
        settings.recipes = args.recipe.clone().unwrap_or(settings.recipes);
        settings.steps = args.steps.unwrap_or(settings.steps);
        settings.seed = args.seed.unwrap_or(settings.seed);
        settings.batch = args.batch.unwrap_or(settings.batch);
        settings.micro_batches = args.micro_batches.unwrap_or(ranks.group.size());
        settings.moments = args.moments.map_or(settings.moments, Into::into);
        settings.kept = args.kept.map_or(settings.kept, Into::into);
        settings.model.attention = args.attention;
        settings.model.activations = args.activations.unwrap_or_default();
        for (size, asked) in sizes(&mut settings.model, args) {
            *size = asked.unwrap_or(*size);
        }
    }
    ensure!(
        settings.steps > 0,
        "--steps 0: there is nothing to train, give at least 1"
    );
    ensure!(
        settings.batch > 0,
        "--batch 0: a batch needs at least one sequence"
    );
    ensure!(
        args.checkpoint_every > 0,
        "--checkpoint-every 0: give at least 1"
    );
    ranks.share(settings.micro_batches, settings.batch)?;
    let parameters = size::check(&settings.model)?;
    size::check_groups(settings.model.hidden_size, &settings.recipes)?;
    if args.resume.is_some() {
        same("--recipe", args.recipe.as_ref(), &settings.recipes)?;
        same("--steps", args.steps.as_ref(), &settings.steps)?;
        same("--seed", args.seed.as_ref(), &settings.seed)?;
        same("--batch", args.batch.as_ref(), &settings.batch)?;
        same(
            "--micro-batches",
            args.micro_batches.as_ref(),
            &settings.micro_batches,
        )?;
        let moments = args.moments.map(Into::into);
        ensure!(
            moments.is_none_or(|moments: MomentStorage| moments == settings.moments),
            "--moments: the run was begun with another storage"
        );
        same("--kept", args.kept.map(Into::into).as_ref(), &settings.kept)?;
        if args.attention.is_some() {
            let saved = settings.model.attention;
            same("--attention", Some(&args.attention), &saved)?;
        }
        let saved = settings.model.activations;
        same("--activations", args.activations.as_ref(), &saved)?;
        for ((size, asked), flag) in sizes(&mut settings.model, args).into_iter().zip(SIZES) {
            same(flag, asked.as_ref(), size)?;
        }
    }
    let (batch, model) = (settings.batch, &settings.model);
    let data = Data::load(args.data.as_deref(), model.vocab_size, batch, model.context)?;
    let data = data.on(&device);
    if let Some(dir) = &args.resume {
        ensure!(
            data.fingerprint == settings.data,
            "the text has changed since {} was written ({} then, {} now): name the old one with --data",
            dir.display(),
            settings.data,
            data.fingerprint
        );
    }
    settings.data = data.fingerprint.clone();

    let mut runs = vec![];
    for name in &settings.recipes {
        ensure!(
            runs.iter().all(|run: &Run| run.name != *name),
            "--recipe names {name} twice"
        );
        let mut run = Run::new(name, &settings, &device, ranks)?;
        run.measure_every(args.stats);
        run.measure_times(args.profile);
        run.model.set_recomputation(args.recompute);
        runs.push(run);
    }
    let auto = runs.iter().find(|run| run.name == AUTO);
    settings.slow_layers = auto.and_then(|run| run.report.as_ref()).map(choice::slow);
    for run in &mut runs {
        run.settings.clone_from(&settings);
    }
    ensure!(!runs.is_empty(), "--recipe names nothing to train");
    let dir = match &args.resume {
        Some(dir) => {
            if ranks.leads() {
                std::fs::create_dir_all(runs::checkpoints(dir))?;
            }
            for run in &mut runs {
                run.resume(dir)?;
            }
            dir.clone()
        }
        None => {
            let begin = || args.flags.begin(runs::DEFAULT, true);
            let dir = ranks.chosen(|| Ok(vec![begin()?.display().to_string()]))?;
            dir.into_iter().map(PathBuf::from).collect()
        }
    };
    if ranks.leads() {
        println!(
            "text: {}; {:.1} million parameters",
            data.description,
            parameters as f64 / 1e6
        );
    }
    // Where two runs have one, that of `auto` says more.
    let reports = runs.iter().filter(|run| run.report.is_some());
    if let Some(report) = reports
        .max_by_key(|run| run.name == AUTO)
        .and_then(|run| run.report.as_ref())
        .filter(|_| ranks.leads())
    {
        println!("{report}");
    }
    let done: BTreeMap<String, u64> = runs.iter().map(|r| (r.name.clone(), r.step)).collect();
    if args.resume.is_some() && ranks.leads() {
        trim_stats(dir.join(STATS), |name, step| {
            done.get(name).is_some_and(|&last| step <= last)
        })?;
    }
    let keep = |line: &Line| {
        // The validation at the last step is the final one, which every finished run repeats.
        let repeated = matches!(line, Line::Validation { .. }) && line.step() == settings.steps;
        let done = done
            .get(line.recipe())
            .is_some_and(|&step| line.step() <= step);
        args.resume.is_some() && done && !repeated
    };
    let mut metrics = match ranks.leads() {
        true => Metrics::open(&dir, keep)?,
        false => Metrics::in_memory(),
    };

    let stopped = training::train_side_by_side(
        &mut runs,
        &settings,
        &data,
        &mut metrics,
        &dir,
        args.checkpoint_every,
        ranks,
    )?;
    if !ranks.leads() {
        return Ok(stopped);
    }
    if ranks.is_sharded() {
        for run in &mut runs {
            *run = run.whole(&dir)?;
        }
    }
    let profiles = runs
        .iter()
        .filter_map(|run| Some((run, run.profile.as_ref()?)));
    for (run, profile) in profiles {
        println!("\nwhere a step's time went, {}:\n{profile}", run.name);
    }
    if stopped.is_some() {
        println!("stopped; continue with --resume {}", dir.display());
        return Ok(stopped);
    }
    outcome::summarize(&runs, &settings, &data, &mut metrics, &dir, ranks)?;
    // The FP8 run to serve: `delayed` if there is one.
    let fp8 = runs.iter().filter(|run| run.recipe.is_some());
    let served = fp8.max_by_key(|run| run.name == "delayed");
    match served {
        Some(run) => outcome::serve_fp8(run, &settings, &data, &dir, &device)?,
        None => outcome::save_plain(&runs[0], &data, &dir)?,
    }
    Ok(None)
}

const SIZES: [&str; 5] = ["--hidden", "--layers", "--heads", "--context", "--vocab"];

/// The sizes of a model and the arguments for them, in the order of [`SIZES`].
fn sizes<'a>(model: &'a mut GptConfig, args: &Args) -> [(&'a mut usize, Option<usize>); 5] {
    [
        (&mut model.hidden_size, args.hidden),
        (&mut model.num_layers, args.layers),
        (&mut model.num_heads, args.heads),
        (&mut model.context, args.context),
        (&mut model.vocab_size, args.vocab),
    ]
}

fn same<T: PartialEq + std::fmt::Debug>(flag: &str, asked: Option<&T>, saved: &T) -> Result<()> {
    match asked {
        Some(asked) if asked != saved => {
            bail!("{flag} {asked:?} does not fit the run to resume, which has {saved:?}")
        }
        _ => Ok(()),
    }
}
