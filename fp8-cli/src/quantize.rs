//! `fp8 quantize`: makes an FP8 checkpoint of a model in high precision.

use crate::card::Card;
use crate::output::Target;
use crate::progress::{BYTES, Bar, COUNT};
use crate::source;
use crate::texts;
use crate::usage::{Usage, at_least, first_given};
use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use fp8::fp8_files::search::{Chosen, SearchOptions};
use fp8::models::{Model, OutputError, find_codes};
use fp8::rewrite::{self, QuantizeOptions, Relation, Scheme, Spelling, WriteOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// The model: a directory with safetensors files, or a GGUF file
    model: PathBuf,
    /// channel-token, block128, mxfp8, static-tensor, dynamic-tensor, tensor-token, weight-only (a scale per channel) or
    /// weight-only:GRANULARITY, which is tensorwise, rowwise, blockwise:ROWSxCOLS (as blockwise:128x128) or mx
    #[arg(long, value_name = "SCHEME", default_value_t = Scheme::ChannelToken)]
    scheme: Scheme,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    card: Card,
    #[command(flatten)]
    target: Target,
}

/// What to quantize and how to spell it.
#[derive(clap::Args)]
pub struct Choice {
    /// compressed-tensors, fp8-blocks (DeepSeek, Qwen), autofp8 or modelopt
    #[arg(long, value_name = "SPELLING", default_value_t = Spelling::CompressedTensors)]
    to: Spelling,
    /// Layers that stay in high precision: paths, globs, or `re:` and a regular expression
    #[arg(long, value_name = "PATTERN")]
    ignore: Vec<String>,
    /// Quantize the head too
    #[arg(long)]
    head: bool,
    /// For static-tensor: a JSON object of the largest absolute input of each layer, by path
    #[arg(long, value_name = "FILE")]
    amaxes: Option<PathBuf>,
    /// For static-tensor: a text, plain or JSON lines, to run the model on to find these inputs
    #[arg(long, value_name = "FILE", conflicts_with = "amaxes")]
    calibrate: Option<PathBuf>,
    /// A text, plain or JSON lines, to run the model on to find codes and scales that keep the errors of the layers' outputs small. The files have the same
    /// form, size and speed as without it. For static-tensor it also gives the largest inputs, unless --amaxes or --calibrate does
    #[arg(long, value_name = "FILE")]
    search: Option<PathBuf>,
    /// Samples to take from each text, of 512 tokens or the model's positions if it has fewer [default: 8 to calibrate, 24 to search]
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    samples: Option<usize>,
}

impl Choice {
    /// The first flag that was given, if any.
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            (self.to != Spelling::default(), "--to"),
            (!self.ignore.is_empty(), "--ignore"),
            (self.head, "--head"),
            (self.amaxes.is_some(), "--amaxes"),
            (self.calibrate.is_some(), "--calibrate"),
            (self.search.is_some(), "--search"),
            (self.samples.is_some(), "--samples"),
        ];
        first_given(given)
    }

    /// The files that it reads.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let files = [&self.amaxes, &self.calibrate, &self.search];
        files.into_iter().flatten().map(PathBuf::as_path)
    }

    /// The first given flag that is about single layers, if any.
    pub fn by_layer(&self) -> Option<&'static str> {
        let given = [
            (!self.ignore.is_empty(), "--ignore"),
            (self.amaxes.is_some(), "--amaxes"),
            (self.calibrate.is_some(), "--calibrate"),
            (self.search.is_some(), "--search"),
        ];
        first_given(given)
    }

    /// A scheme and its spelling in words.
    pub fn described(&self, scheme: Scheme) -> String {
        format!("{scheme}, spelt as {}", self.to)
    }

    /// Fails for a flag that has no effect under `scheme` or beside the others.
    fn check(&self, scheme: Scheme) -> Result<()> {
        let given = [
            (self.amaxes.is_some(), "--amaxes"),
            (self.calibrate.is_some(), "--calibrate"),
        ];
        if let (false, Some(flag)) = (scheme.needs_calibration(), first_given(given)) {
            let why = format!("{flag} is for static inputs, and --scheme is {scheme}");
            return Err(Usage(why).into());
        }
        if self.samples.is_some() && self.calibrate.is_none() && self.search.is_none() {
            return Err(Usage("--samples needs --calibrate or --search".into()).into());
        }
        Ok(())
    }

    /// The options for a scheme; `model`, the model of `weights`, is run for its inputs' amaxes and for the search, if a text was given
    /// for that.
    pub fn options(
        &self,
        scheme: Scheme,
        write: WriteOptions,
        model: &crate::model::Source,
        weights: &dyn rewrite::Source,
    ) -> Result<QuantizeOptions> {
        self.check(scheme)?;
        let options = QuantizeOptions::new(scheme)
            .with_spelling(self.to)
            .with_ignore(self.ignore.clone())
            .with_head(self.head)
            .with_write(write);
        let calibrates = scheme.needs_calibration().then_some(self.search.as_ref());
        let text = self.calibrate.as_ref().or(calibrates.flatten());
        let input_amaxes = match (&self.amaxes, text) {
            (Some(path), _) => read_amaxes(path)?,
            (None, Some(text)) => {
                // A search reads more samples, and the scales should cover all of them.
                let most = if self.search.is_some() {
                    SEARCHED
                } else {
                    CALIBRATED
                };
                calibrate(model, text, self.samples.unwrap_or(most))?
            }
            (None, None) if scheme.needs_calibration() => {
                let why = "needs the inputs' amaxes: give --calibrate TEXT or --amaxes FILE";
                return Err(Usage(format!("--scheme {scheme} {why}")).into());
            }
            (None, None) => BTreeMap::new(),
        };
        let options = options.with_input_amaxes(input_amaxes);
        let Some(text) = &self.search else {
            return Ok(options);
        };
        let chosen = search(
            model,
            weights,
            text,
            self.samples.unwrap_or(SEARCHED),
            &options,
        )?;
        Ok(options.with_chosen(chosen))
    }
}

pub fn run(args: &Args) -> Result<()> {
    let runs = crate::model::Source::of(&args.model);
    let read = args.choice.files().chain(args.card.eval.as_deref());
    args.target.check(read.chain([&*args.model]))?;
    args.card.check(&runs)?;
    let card = match args.card.no_card {
        true => None,
        false => Some((args.card).begin(&args.model, &args.target.out, Relation::Quantized)?),
    };
    let write = args.target.options();
    let model = source::open(&args.model)?;
    let options = args.choice.options(args.scheme, write, &runs, &*model)?;
    let mut bar = Bar::new("quantize", BYTES)?;
    let mut report = rewrite::quantize(&*model, &args.target.out, &options, &mut |p| bar.show(p))?;
    drop(bar);
    if let Some(card) = card {
        let out = &args.target.out;
        let scheme = args.choice.described(args.scheme);
        let made = crate::model::Source::of(out);
        (args.card).write(card, Some(scheme), (&runs, &made), &mut report)?;
    }
    args.target.print(&report)
}

fn read_amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    const LIMIT: u64 = 64 << 20;
    let text = fp8::read::read_text(path, LIMIT)?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON object of numbers by path", path.display()))
}

/// Tokens of a sample, for models with as many positions.
const SAMPLE: usize = 512;

/// Samples to calibrate with.
const CALIBRATED: usize = 8;

/// Samples to search with.
const SEARCHED: usize = 24;

/// A model in high precision, and the tokens of a text.
struct Run {
    model: Model,
    ids: Vec<u32>,
}

impl Run {
    fn new(source: &crate::model::Source, text: &Path) -> Result<Self> {
        let ids = texts::tokens(text, &source.tokenizer()?)?;
        if ids.is_empty() {
            bail!("{}: no token to run the model on", text.display());
        }
        let model = source.load_high_precision();
        let model = model.context("the model has to run on the text of --search or --calibrate")?;
        Ok(Self { model, ids })
    }

    fn samples(&self, samples: usize) -> Vec<&[u32]> {
        let positions = self.model.max_positions().unwrap_or(SAMPLE);
        let chunks = self.ids.chunks(SAMPLE.min(positions));
        chunks.take(samples).collect()
    }
}

/// The largest inputs of each layer while the model reads a text.
fn calibrate(
    source: &crate::model::Source,
    text: &Path,
    samples: usize,
) -> Result<BTreeMap<String, f32>> {
    let run = Run::new(source, text)?;
    let samples = run.samples(samples);
    let mut bar = Bar::new("calibrate", COUNT)?;
    let count = samples.len() as u64;
    let amaxes = rewrite::input_amaxes(&run.model, || {
        for (i, sample) in samples.iter().enumerate() {
            if bar.at("", i as u64, count).is_break() {
                return Err(fp8::Error::Files(fp8::FilesError::Cancelled));
            }
            let ids = Tensor::from_slice(sample, (1, sample.len()), &Device::Cpu)?;
            (run.model.forward(&ids)).map_err(candle_core::Error::from)?;
        }
        Ok(())
    })?;
    drop(bar);
    Ok(amaxes)
}

/// The codes of the layers that `options` quantize, and shifts of norms, found on a text.
fn search(
    source: &crate::model::Source,
    weights: &dyn rewrite::Source,
    text: &Path,
    samples: usize,
    options: &QuantizeOptions,
) -> Result<Chosen> {
    let mut run = Run::new(source, text)?;
    source.merge_adapter(&mut run.model)?;
    let samples = run.samples(samples);
    let mut bar = Bar::new("search", COUNT)?;
    let search = SearchOptions::new();
    let found = find_codes(&run.model, weights, &samples, options, &search, &mut |p| {
        bar.show(p)
    });
    drop(bar);
    let found = found.with_context(|| text.display().to_string())?;
    if let Some(first) = found.plain.first() {
        let count = found.plain.len();
        eprintln!(
            "rounded plainly, because the search cannot see the inputs: {count} of the layers, `{first}` first"
        );
    }
    let count = found.errors.len().max(1) as f64;
    let mean = |of: fn(&OutputError) -> f64| found.errors.iter().map(of).sum::<f64>() / count;
    eprintln!(
        "mean error of the outputs of {} layers on the samples: {:.2}%, with plain rounding {:.2}%",
        found.errors.len(),
        mean(|layer| layer.found) * 100.,
        mean(|layer| layer.plain) * 100.
    );
    if let Some(first) = found.shifted.first() {
        let count = found.shifted.len();
        eprintln!("outliers moved into the weights after {count} norms, `{first}` first");
    }
    if let Some(first) = found.retuned.first() {
        let count = found.retuned.len();
        eprintln!(
            "features rescaled for smaller rounding errors in {count} norms, `{first}` first"
        );
    }
    Ok(found.chosen)
}
