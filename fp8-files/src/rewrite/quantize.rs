//! A model in high precision into FP8.

use super::companions::Changes;
use super::convert::{
    Origin, add_scales, keep, kv_tensors, layer_batch, name_others, other_batch, sort,
};
use super::job::Job;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::scheme::Scheme;
use super::select::{Patterns, role};
use super::source::{Source, model_dtype, take_scales};
use crate::check::first_outside;
use crate::contents::Role;
use crate::contents::{Contents, Described, HEAD};
use crate::error::{Error, Result};
use crate::load::StoredLayer;
use crate::scheme::InputScheme;
use crate::spelling::Spelling;
use candle_core::{DType, Device};
use fp8_candle::InputScaling;
use std::collections::BTreeMap;
use std::path::Path;

/// What can be done about a layer whose features cannot be cut into groups.
const WAY_OUT: &str = "leave it in high precision by `QuantizeOptions::with_ignore` (`--ignore`), or choose a scheme without groups: \
     channel-token";

/// What [`quantize`] makes.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::{QuantizeOptions, Scheme, Spelling};
/// let options = QuantizeOptions::new(Scheme::Block128)
///     .with_spelling(Spelling::Fp8Blocks)
///     .with_ignore(["*.down_proj", "re:.*layers\\.0\\."]);
/// assert_eq!(options.ignore.len(), 2);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// How weights and inputs are scaled.
    pub scheme: Scheme,
    /// How it is written down.
    pub spelling: Spelling,
    /// Layers that stay in high precision: paths, globs (`*` also stands for dots), or `re:` and a regular expression that matches from
    /// the start.
    pub ignore: Vec<String>,
    /// Whether the head is quantized too. Default no, unless it is FP8 already.
    pub head: bool,
    /// For static schemes: the largest absolute input of each layer, by path.
    pub input_amaxes: BTreeMap<String, f32>,
    /// Options of the files.
    pub write: WriteOptions,
}

impl QuantizeOptions {
    /// Compressed-tensors files of all linear layers but the head.
    pub fn new(scheme: Scheme) -> Self {
        Self {
            scheme,
            ..Self::default()
        }
    }

    /// See [`QuantizeOptions::spelling`].
    #[must_use]
    pub fn with_spelling(mut self, spelling: Spelling) -> Self {
        self.spelling = spelling;
        self
    }

    /// Adds to [`QuantizeOptions::ignore`].
    #[must_use]
    pub fn with_ignore<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.ignore.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// See [`QuantizeOptions::head`]. A head that is tied to the embedding is written in FP8 beside the embedding, which stays in high
    /// precision, and the configuration no longer ties them.
    #[must_use]
    pub fn with_head(mut self, head: bool) -> Self {
        self.head = head;
        self
    }

    /// See [`QuantizeOptions::input_amaxes`].
    #[must_use]
    pub fn with_input_amaxes(mut self, amaxes: BTreeMap<String, f32>) -> Self {
        self.input_amaxes = amaxes;
        self
    }

    /// See [`QuantizeOptions::write`].
    #[must_use]
    pub fn with_write(mut self, write: WriteOptions) -> Self {
        self.write = write;
        self
    }
}

/// Quantizes the linear layers of a model and writes it into the directory `target`.
///
/// Linear layers are the matrices called `X.weight`, but embeddings, routers of experts (`gate`, `router`) and, unless
/// [`QuantizeOptions::with_head`], heads. Scales are amax/448 in f32 (powers of two for microscaling: 2^ceil(log2(amax/448))), codes are
/// rounded to the nearest. FP8 layers of the source are dequantized first and so rounded twice, which
/// [`WriteReport::requantized`] lists; a head among them stays FP8. [`convert`](super::convert) keeps their codes.
///
/// The directory gets the weights in files of [`WriteOptions::shard_bytes`] with an index, `config.json` with the source's entries and
/// `quantization_config`, in which every linear layer in high precision is listed, and copies of tokenizer, vocabulary, chat template
/// and generation settings. One layer at a time is in memory. The directory comes into sight when it is whole; an error or
/// [`Error::Cancelled`] leaves nothing behind.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, QuantizeOptions, Scheme};
/// # use candle_core::{Device, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let (model, target) = (dir.path().join("model"), dir.path().join("fp8"));
/// # std::fs::create_dir(&model)?;
/// # let w = Tensor::randn(0f32, 1., (32, 64), &Device::Cpu)?;
/// # candle_core::safetensors::save(&[("fc.weight", w)].into(), dir.path().join("model/model.safetensors"))?;
/// let model = Checkpoint::open_dir(&model)?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// let report = rewrite::quantize(&model, &target, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.quantized, ["fc"]);
/// assert_eq!(report.files, ["config.json", "model.safetensors"]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Inexpressible`] if the spelling cannot say the scheme; [`Error::MissingAmax`] for a static scheme without a layer's amax;
/// [`Error::NotExportable`] for a layer whose inputs cannot be cut into the scheme's groups; [`Error::TensorValue`] for a weight that is
/// not finite; [`Error::MissingConfig`] for Mistral's own files; [`Error::NothingToConvert`] if there is no linear layer to quantize; [`Error::TargetExists`]; [`Error::Cancelled`]; and if a
/// file cannot be read or written.
pub fn quantize(
    source: &dyn Source,
    target: impl AsRef<Path>,
    options: &QuantizeOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<WriteReport> {
    let spelling = options.spelling;
    let kind = options.scheme.kind();
    let mut patterns = Patterns::parse(&options.ignore)?;
    let mut contents = Contents::default();
    let parts = take_scales(source, source.names())?;
    let names = keep(parts, &options.write, &mut contents);
    let default = model_dtype(source, &names);
    let mut others = vec![];
    for name in names {
        match role(source, &name) {
            Some((path, role)) => {
                let ignored = patterns.matches(path)?;
                let head = options.head || source.is_fp8(&name);
                let chosen = role == Role::Linear || (role == Role::Head && head);
                match source.shape(&name).as_deref() {
                    Some(&[n, k]) if chosen && !ignored => contents.layers.push(Described {
                        path: path.to_string(),
                        kind,
                        sizes: (n, k),
                    }),
                    _ => others.push(name),
                }
            }
            None => others.push(name),
        }
    }
    let mut tied = None;
    let has_head = source.shape(&format!("{HEAD}.weight")).is_some();
    if options.head && !has_head && !patterns.matches(HEAD)? {
        tied = embedding(source, &others);
        if let Some(&[n, k]) = tied.as_ref().and_then(|name| source.shape(name)).as_deref() {
            contents.layers.push(Described {
                path: HEAD.to_string(),
                kind,
                sizes: (n, k),
            });
        }
    }
    if contents.layers.is_empty() {
        return Err(Error::NothingToConvert);
    }
    for layer in &contents.layers {
        kind.check(layer.sizes, &layer.path, WAY_OUT)?;
        if options.scheme.needs_calibration() && !options.input_amaxes.contains_key(&layer.path) {
            return Err(Error::MissingAmax {
                path: layer.path.clone(),
            });
        }
    }
    contents
        .layers
        .sort_by_cached_key(|layer| super::source::natural_order(&layer.path));
    name_others(source, &others, &mut contents);
    spelling.check(&contents)?;
    let paths = contents.layers.iter().map(|layer| layer.path.clone());
    let requantized = paths.filter(|path| source.is_fp8(&crate::names::join(path, "weight")));
    let requantized = requantized.collect();

    let mut batches: Vec<_> = contents
        .layers
        .iter()
        .map(|layer| layer_batch(spelling, layer))
        .collect();
    add_scales(spelling, &contents, &mut batches)?;
    for name in others {
        let dtype = source.dtype(&name).unwrap_or(default);
        batches.push(other_batch(source, name, dtype));
    }
    sort(&mut batches);
    let untied = contents.layers.iter().any(|layer| layer.path == HEAD);
    let job = Job {
        source,
        target: target.as_ref(),
        options: &options.write,
        batches,
        contents,
        spelling: Some(spelling),
        changes: Changes {
            untied,
            default_dtype: Some(default),
            ..Changes::default()
        },
        unmatched: patterns.unmatched(),
        exact_inputs: vec![],
        requantized,
    };
    job.run(on_progress, |origin| match origin {
        Origin::Layer(layer, layouts) => {
            let name = match &tied {
                Some(embedding) if layer.path == HEAD => embedding.clone(),
                _ => format!("{}.weight", layer.path),
            };
            let layer = quantized(source, layer, &name, options)?;
            layouts
                .iter()
                .map(|layout| layout.tensor(&layer.path, &layer.codes, &layer.input))
                .collect()
        }
        Origin::Kv(scale) => kv_tensors(spelling, scale),
        Origin::Attention(scale) => Ok(vec![spelling.attention_tensor(scale)?]),
        Origin::Other(name, dtype) => Ok(vec![source.value(name, *dtype)?]),
    })
}

/// The embedding that a model without a head uses as one; None if its configuration ties nothing.
fn embedding(source: &dyn Source, others: &[String]) -> Option<String> {
    if let Some(other) = source.tied().get(&format!("{HEAD}.weight")) {
        return Some(other.clone());
    }
    let config = source.config()?;
    let places = ["/tie_word_embeddings", "/text_config/tie_word_embeddings"];
    let told = places
        .iter()
        .find_map(|place| config.pointer(place)?.as_bool());
    // The default of the models that leave it out is not known here.
    if told != Some(true) {
        return None;
    }
    let mut names = others.iter();
    let embedding =
        |name: &&String| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    names.find(embedding).cloned()
}

fn quantized(
    source: &dyn Source,
    layer: &Described,
    name: &str,
    options: &QuantizeOptions,
) -> Result<StoredLayer> {
    let path = &layer.path;
    let weight = source.value(name, DType::F32)?;
    if let Some((index, value)) = first_outside(&weight, f64::is_finite)? {
        return Err(Error::TensorValue {
            tensor: name.to_string(),
            index,
            value,
            expected: "finite, as a weight has to be".into(),
        });
    }
    let codes = layer.kind.quantize(&weight, None, path)?;
    let input = match layer.kind.input {
        InputScheme::Static => {
            let amax = options.input_amaxes.get(path).copied();
            let amax = amax.ok_or_else(|| Error::MissingAmax { path: path.clone() })?;
            InputScaling::Static(layer.kind.input_scale(amax, &Device::Cpu, path)?)
        }
        // What the configuration says; no tensor is made of it.
        _ => InputScaling::None,
    };
    Ok(StoredLayer {
        path: path.clone(),
        codes,
        input,
    })
}
