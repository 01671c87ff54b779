//! The model card beside what a command writes.

use crate::eval::{logits, nll};
use crate::model::{Source, known_classes};
use crate::progress;
use crate::requests::Request;
use crate::texts::{self, Pieces};
use crate::usage::{Interrupted, Usage};
use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use fp8::load::Checkpoint;
use fp8::models::{Bert, CausalLm, Config, Llama, Model, Pooling, Tokenizer, config_of};
use fp8::rewrite::{CARD_FILE, Measure, ModelCard, Relation, WriteReport, hub_name};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The request of the system to stop, if one has come.
pub type Asked<'a> = &'a dyn Fn() -> Option<Request>;

/// Fails if the system has asked to stop.
fn go_on(asked: Asked<'_>) -> Result<()> {
    match asked() {
        Some(request) => Err(Interrupted(request).into()),
        None => Ok(()),
    }
}

/// Options of the card.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
pub struct Card {
    /// Write no README.md
    #[arg(long)]
    pub no_card: bool,
    /// For README.md: a text on which the base and what is written are compared, plain or JSON lines as `fp8 train` takes them; for an
    /// encoder a text on each line
    #[arg(long, value_name = "FILE", conflicts_with = "no_card")]
    pub eval: Option<PathBuf>,
    /// For README.md: the base's name on the hub [default: known for folders of the hub's cache]
    #[arg(long, value_name = "OWNER/NAME", conflicts_with = "no_card")]
    pub base_model: Option<String>,
}

impl Card {
    /// Fails now for what would otherwise fail at the end.
    pub fn check(&self, base: &Source) -> Result<()> {
        if let Some(name) = &self.base_model {
            let part = |part: &str| {
                let own = |c: char| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c);
                part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(own)
            };
            let is_name = name
                .split_once('/')
                .is_some_and(|(owner, name)| part(owner) && part(name));
            if !is_name {
                let expected = "expected OWNER/NAME, as the hub has it";
                return Err(Usage(format!("--base-model is {name}: {expected}")).into());
            }
        }
        if let Some(path) = &self.eval {
            let is_encoder = matches!(known_classes(base.path()), Ok(Some(_)));
            if is_encoder {
                Pooling::of_dir(base.path())?;
            }
            texts::check(path, &base.tokenizer()?, is_encoder)?;
        }
        Ok(())
    }

    /// A card of the model in `out`, which was made from `base`.
    pub fn begin(&self, base: &Path, out: &Path, relation: Relation) -> Result<ModelCard> {
        let name = |path: &Path| {
            let full = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
            let name = full.file_name().unwrap_or(full.as_os_str());
            name.to_string_lossy().into_owned()
        };
        let hub = self.base_model.clone().or_else(|| hub_name(base));
        ModelCard::new(name(out), name(base), relation)
            .with_hub_base(hub)
            .with_command(command())
            .with_source_of(Some(base).filter(|base| base.is_dir()))
            .map_err(Into::into)
    }

    /// Adds what `--eval` measures on `made` and on its `base`, unless the system has `asked` to stop.
    pub fn measure(
        &self,
        mut card: ModelCard,
        (base, made): (&Source, &Source),
        asked: Asked<'_>,
    ) -> Result<ModelCard> {
        if let Some(path) = &self.eval {
            for measure in measured(path, base, made, asked)? {
                card = card.with_measure(measure);
            }
        }
        Ok(card)
    }

    /// Writes the card of a model in FP8 or, without a scheme, in high precision, and adds the file to the report. If the system asks to stop,
    /// the model stays as it is, without a card.
    pub fn write(
        &self,
        card: ModelCard,
        scheme: Option<String>,
        models: (&Source, &Source),
        report: &mut WriteReport,
    ) -> Result<()> {
        // The head that a list of layers in high precision always has, which an encoder lacks.
        let dir = &report.directory;
        // The folder may hold a model that is not known here, with any layers.
        let config = config_of(&Checkpoint::open_dir(dir)?, dir);
        let is_encoder = matches!(config, Ok(Config::Bert(_)));
        let kept = report.ignored.iter();
        let kept: Vec<String> = kept
            .filter(|path| !(is_encoder && *path == "lm_head"))
            .cloned()
            .collect();
        let card = match scheme {
            None => card,
            Some(scheme) => (card.with_tags(["fp8"]))
                .with_fact("Scheme", scheme)
                .with_fact("Layers in FP8", report.quantized.len().to_string())
                .with_high_precision(&kept),
        };
        let card = card.with_fact("Size of the tensors", crate::output::size(report.bytes));
        let card = self.measure(card, models, &progress::request);
        let card = card.inspect_err(|error| {
            if error.is::<Interrupted>() {
                eprintln!(
                    "stopped: {} is complete, but has no {CARD_FILE}",
                    dir.display()
                );
            }
        })?;
        card.write(dir)?;
        report.files.push(CARD_FILE.to_string());
        report.files.sort();
        Ok(())
    }
}

/// The command line, as a shell reads it.
pub fn command() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    let quoted = |word: String| match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    let words = std::env::args_os().skip(1);
    let words = words.map(|word| quoted(word.to_string_lossy().into_owned()));
    std::iter::once("fp8".to_string())
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Compares the base and the made model on a text.
fn measured(path: &Path, base: &Source, made: &Source, asked: Asked<'_>) -> Result<Vec<Measure>> {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let name = name.to_string_lossy();
    let tokenizer = made.tokenizer()?;
    match (base.load()?.0, made.load()?.0) {
        (Model::Llama(base), Model::Llama(made)) => {
            let models = (&base, &made);
            let [before, after, cosine] = language_models(&tokenizer, path, models, asked)?;
            Ok(vec![
                Measure::new(format!("Perplexity on {name}"), before, after),
                Measure::new(
                    format!("Mean cosine of the logits to the base's on {name}"),
                    None,
                    cosine,
                ),
            ])
        }
        (Model::Bert(before), Model::Bert(after)) => {
            let pooling = Pooling::of_dir(made.path())?;
            let longest = texts::longest_of(made.path(), &after)?;
            let texts = texts::for_encoder(path, (&tokenizer, longest))?;
            let cosine = encoders(&texts, (&before, &after), pooling, asked)?
                .with_context(|| format!("--eval: {}: no line has a token", path.display()))?;
            Ok(vec![Measure::new(
                format!("Mean cosine of the embeddings to the base's on the lines of {name}"),
                None,
                cosine,
            )])
        }
        _ => bail!(
            "{} and {} are models of different kinds",
            base.path().display(),
            made.path().display()
        ),
    }
}

/// Perplexities of both models, and the mean cosine of their logits.
fn language_models(
    tokenizer: &Tokenizer,
    path: &Path,
    (base, made): (&Llama, &Llama),
    asked: Asked<'_>,
) -> Result<[f64; 3]> {
    let (mut sums, mut counted) = ([0f64; 3], 0);
    for piece in &Pieces::open(path, tokenizer, made, None, None)?.pieces {
        go_on(asked)?;
        let (before, after) = (logits(base, piece)?, logits(made, piece)?);
        let vocabulary = made.vocab_size();
        let rows = before
            .par_chunks(vocabulary)
            .zip(after.par_chunks(vocabulary));
        let targets = piece.ids.par_iter().zip(&piece.predicted).skip(1);
        let found: Vec<[f64; 3]> = rows
            .zip(targets)
            .filter(|(_, (_, predicted))| **predicted)
            .map(|((a, b), (target, _))| {
                let target = *target as usize;
                [nll(a, target), nll(b, target), cosine(a, b)]
            })
            .collect();
        counted += found.len();
        for found in found {
            for (sum, own) in sums.iter_mut().zip(found) {
                *sum += own;
            }
        }
    }
    if counted == 0 {
        bail!("--eval: the text has fewer than two tokens");
    }
    let [before, after, cosine] = sums.map(|sum| sum / counted as f64);
    let found = [before.exp(), after.exp(), cosine];
    match found.iter().all(|x| x.is_finite()) {
        true => Ok(found),
        false => bail!("--eval: the logits are not finite"),
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE)
}

/// The mean cosine of the embeddings of texts; None if there are none.
fn encoders(
    texts: &[Vec<u32>],
    (before, after): (&Bert, &Bert),
    pooling: Pooling,
    asked: Asked<'_>,
) -> Result<Option<f64>> {
    let (mut sum, mut count) = (0., 0);
    for ids in texts {
        go_on(asked)?;
        let ids = Tensor::from_slice(ids, (1, ids.len()), after.device())?;
        let mask = ids.ones_like()?;
        let vector = |model: &Bert| -> Result<Vec<f32>> {
            Ok(model
                .embed_with(&ids, &mask, pooling)?
                .squeeze(0)?
                .to_vec1()?)
        };
        sum += cosine(&vector(before)?, &vector(after)?);
        count += 1;
    }
    Ok((count > 0).then(|| sum / f64::from(count)))
}
