//! `fp8 merge`: a model with an adapter added to its weights.

use crate::card::Card;
use crate::dequantize::Precision;
use crate::model::{self, known_classes};
use crate::output::Target;
use crate::progress::{BYTES, Bar};
use crate::quantize::Choice;
use crate::source::{self, found_adapter, on_base};
use crate::usage::Usage;
use anyhow::Result;
use fp8::fp8_files::adapter::AdapterFile;
use fp8::models::label_name;
use fp8::rewrite::{self, Classifier, Merged, Relation, Scheme, Source};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// The base: a directory with safetensors files in FP8 or high precision, or a GGUF file
    base: PathBuf,
    /// The adapter: a directory with adapter_config.json and adapter_model.safetensors, as PEFT writes it
    adapter: PathBuf,
    /// Dtype of all weights [default: each keeps its own; those that were FP8 get the model's]
    #[arg(long, value_enum, conflicts_with = "scheme")]
    dtype: Option<Precision>,
    /// Write FP8 by this scheme of `fp8 quantize`, instead of high precision
    #[arg(long, value_name = "SCHEME")]
    scheme: Option<Scheme>,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    card: Card,
    #[command(flatten)]
    target: Target,
}

/// The classes that an adapter brings to a base without a classifier; PEFT's own files have no names for them.
fn classes(base: &Path, adapter: &AdapterFile) -> Result<Vec<String>> {
    let labels = &adapter.config().labels;
    let saved = adapter.saved().iter();
    let mut saved = saved.filter(|layer| layer.path.ends_with(CLASSIFIER));
    match (saved.next(), known_classes(base)?) {
        (Some(layer), Some(known)) if labels.is_empty() && known.is_empty() => {
            Ok((0..layer.sizes.0).map(label_name).collect())
        }
        _ => Ok(labels.clone()),
    }
}

/// The layer that a classifier has beside its encoder.
const CLASSIFIER: &str = "classifier";

pub fn run(args: &Args) -> Result<()> {
    let given = args.choice.given().or(args.target.of_caches());
    if let (None, Some(flag)) = (args.scheme, given) {
        return Err(Usage(format!("{flag} is for FP8: it needs --scheme")).into());
    }
    let read = args.choice.files().chain(args.card.eval.as_deref());
    args.target
        .check(read.chain([&*args.base, &*args.adapter]))?;
    args.card.check(&model::Source::of(&args.base))?;
    let card = match args.card.no_card {
        true => None,
        false => Some((args.card).begin(&args.base, &args.target.out, Relation::Merge)?),
    };
    let base = source::open(&args.base)?;
    found_adapter(&args.adapter)?;
    let adapter = AdapterFile::open(&args.adapter)?;
    let merged = Merged::new(&*base, &adapter).map_err(|error| on_base(error, &args.adapter))?;
    // A classifier turns its base into another class of model.
    let labels = classes(&args.base, &adapter)?;
    let classifier = (!labels.is_empty()).then(|| Classifier::new(&merged, &labels));
    let source: &dyn Source = match &classifier {
        Some(classifier) => classifier,
        None => &merged,
    };
    let write = args.target.options();
    let mut report = match args.scheme {
        None => {
            let dtype = args.dtype.map(Precision::dtype);
            let mut bar = Bar::new("merge", BYTES)?;
            rewrite::dequantize(source, &args.target.out, dtype, &write, &mut |p| {
                bar.show(p)
            })?
        }
        Some(scheme) => {
            if let (Some(_), Some(flag)) = (&classifier, args.choice.by_layer()) {
                let why = "names layers as the base does, and a classifier has other names: merge first, then use `fp8 quantize`";
                return Err(Usage(format!("{flag} {why}")).into());
            }
            let tuned = model::Source::of(&args.base).with_adapter(&args.adapter);
            let options = args.choice.options(scheme, write, &tuned, &merged)?;
            let mut bar = Bar::new("merge", BYTES)?;
            rewrite::quantize(source, &args.target.out, &options, &mut |p| bar.show(p))?
        }
    };
    if let Some(card) = card {
        let [base, made] = [&args.base, &args.target.out].map(|path| model::Source::of(path));
        let adapter = args.adapter.file_name().unwrap_or(args.adapter.as_os_str());
        let card = card.with_fact("Adapter", adapter.to_string_lossy());
        let scheme = args.scheme.map(|scheme| args.choice.described(scheme));
        args.card.write(card, scheme, (&base, &made), &mut report)?;
    }
    let (layers, adapter) = (merged.layers().len(), args.adapter.display());
    eprintln!("{layers} layers have an update of {adapter}");
    args.target.print(&report)
}
