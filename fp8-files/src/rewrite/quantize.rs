//! Writes a model in FP8.

use super::companions::Changes;
use super::job::Job;
use super::layer::codes_of;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::scheme::Scheme;
use super::select::{Patterns, name_others, role};
use super::shifted::Shifted;
use super::slabs::{self, Distance};
use super::source::{Source, model_dtype, natural_order, take_scales};
use crate::contents::{Contents, Described, HEAD, Role};
use crate::error::{Error, Result};
use crate::load::StoredLayer;
use crate::names::weight_name;
use crate::scheme::static_scale;
use crate::search::Chosen;
use crate::spelling::Spelling;
use candle_core::{DType, Device};
use fp8_candle::InputScaling;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// What to do with a layer whose features do not divide into groups, for errors.
const WAY_OUT: &str =
    "leave it in high precision (--ignore), or choose a scheme without groups: channel-token";

/// Options of [`quantize`].
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::{QuantizeOptions, Scheme, Spelling};
/// let options = QuantizeOptions::new(Scheme::Block128)
///     .with_spelling(Spelling::Fp8Blocks)
///     .with_ignore(["*.down_proj", "re:.*layers\\.0\\."]);
/// assert_eq!(options.ignore.len(), 2);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// How weights and inputs are scaled.
    pub scheme: Scheme,
    /// The family whose names and configuration the files have.
    pub spelling: Spelling,
    /// Layers that stay in high precision: paths, globs (`*` also matches dots), or `re:` and a regular expression anchored at the start.
    pub ignore: Vec<String>,
    /// Whether the head is quantized too. Default no, unless it is FP8 already.
    pub head: bool,
    /// For static schemes: the largest absolute input of each layer, by path.
    pub input_amaxes: BTreeMap<String, f32>,
    /// The results of a search, in place of plain rounding. Default: none.
    pub chosen: Chosen,
    /// Options of the files.
    pub write: WriteOptions,
}

impl QuantizeOptions {
    /// Compressed-tensors files with all linear layers in FP8 except the head.
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

    /// See [`QuantizeOptions::head`]. A head tied to the embedding is written in FP8 beside the embedding, which stays in high precision,
    /// and the configuration no longer ties them.
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

    /// See [`QuantizeOptions::chosen`].
    #[must_use]
    pub fn with_chosen(mut self, chosen: Chosen) -> Self {
        self.chosen = chosen;
        self
    }

    /// The largest absolute input of a layer, for a static scheme.
    fn input_amax(&self, path: &str) -> Option<f32> {
        let chosen = self.chosen.input_amaxes.get(path);
        chosen.or_else(|| self.input_amaxes.get(path)).copied()
    }

    /// How the inputs of a layer are scaled, with their static scale if they have one.
    ///
    /// # Errors
    /// [`Error::MissingAmax`] if [`QuantizeOptions::input_amaxes`] lacks the layer.
    pub fn input_scaling(&self, layer: &Described) -> Result<InputScaling> {
        let path = &layer.path;
        layer.scheme.input.with_scale(|()| {
            let amax = self.input_amax(path);
            let amax = amax.ok_or_else(|| Error::MissingAmax { path: path.clone() })?;
            static_scale(amax, &Device::Cpu, path, "input")
        })
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
/// Linear layers are the matrices called `X.weight`, except embeddings, routers of experts (`gate`, `router`) and, without
/// [`QuantizeOptions::with_head`], heads. Scales are amax/448 in f32 (powers of two for microscaling: 2^ceil(log2(amax/448))), codes are
/// rounded to nearest. An FP8 layer of the source whose scales have the granularity of the scheme keeps its codes and scales. The others
/// are dequantized first, so they are rounded twice: [`WriteReport::requantized`] lists them, and [`WriteReport::requantization_error`] has the
/// error of the second rounding. A head among them stays FP8. [`convert`](super::convert) keeps all codes. Where the source adds the update of an
/// adapter to FP8 weights, [`WriteReport::update_errors`] says what the rounding has changed of it.
///
/// The directory gets the weights in files of [`WriteOptions::shard_bytes`] with an index, `config.json` with the source's entries and a
/// `quantization_config` that lists every linear layer in high precision, and copies of tokenizer, vocabulary, chat template and
/// generation settings. Tensors that candle cannot hold, such as masks of BOOL, keep their bytes ([`Source::raw_dtype`]), and the entries of
/// `config.json` also keep Python's [`NaN` and `Infinity`](crate::python_json). Several layers are processed at once, within [`WriteOptions::memory`]. The directory appears when it is complete; an error
/// or [`Error::Cancelled`] leaves nothing behind.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let (model, target) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// let report = rewrite::quantize(&model, &target, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.quantized, ["fc"]);
/// assert_eq!(report.files, ["config.json", "model.safetensors"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Inexpressible`] if files of the spelling cannot hold the scheme; [`Error::MissingAmax`] for a static scheme without a layer's
/// amax; [`Error::CodesOfNoLayer`] and the errors of [`Shifted::new`] if the results of a search belong to another model;
/// [`Error::NotExportable`] for a layer whose inputs do not divide into the scheme's groups; [`Error::TensorValue`] for a weight that is not
/// finite; [`Error::MissingConfig`] for Mistral's own files; [`Error::NothingToConvert`] if there is no linear layer to
/// quantize; [`Error::TargetExists`]; [`Error::Cancelled`]; and if a file cannot be read or written.
pub fn quantize(
    source: &dyn Source,
    target: impl AsRef<Path>,
    options: &QuantizeOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<WriteReport> {
    check_order(source)?;
    let shifted = Shifted::new(source, &options.chosen.shifts)?;
    let source: &dyn Source = &shifted;
    let Plan {
        contents,
        others,
        tied,
        default_dtype,
        unmatched,
    } = Plan::new(source, options)?;
    let is_quantized = |path: &&String| contents.layers.iter().any(|layer| layer.path == **path);
    if let Some(path) = options.chosen.codes.keys().find(|path| !is_quantized(path)) {
        let first = contents.layers.first().map_or("none", |layer| &layer.path);
        return Err(Error::CodesOfNoLayer {
            path: path.clone(),
            layers: format!("{}, the first is `{first}`", contents.layers.len()),
        });
    }
    let job = Job {
        source,
        target: target.as_ref(),
        options: &options.write,
        spelling: Some(options.spelling),
        changes: Changes {
            untied: contents.layers.iter().any(|layer| layer.path == HEAD),
            dtype: None,
            default_dtype,
        },
        contents,
        others,
        report: WriteReport {
            unmatched,
            ..WriteReport::default()
        },
    };
    // Layers are quantized by several threads.
    let distances: Mutex<BTreeMap<String, Distance>> = Mutex::default();
    let report = job.run(on_progress, |layer| {
        let name = match &tied {
            Some(embedding) if layer.path == HEAD => embedding.clone(),
            _ => weight_name(&layer.path),
        };
        let chosen = options.chosen.codes.get(&layer.path);
        let memory = options.write.memory;
        let (codes, distance) = codes_of(source, layer, &name, chosen, slabs::slab(memory))?;
        if let Some(distance) = distance {
            let mut distances = distances.lock().unwrap_or_else(PoisonError::into_inner);
            distances.insert(layer.path.clone(), distance);
        }
        Ok(StoredLayer {
            path: layer.path.clone(),
            codes,
            input: options.input_scaling(layer)?,
        })
    })?;
    let distances = (distances.into_inner()).unwrap_or_else(PoisonError::into_inner);
    let requantized = report.quantized.iter();
    let requantized = requantized.filter(|path| distances.contains_key(*path));
    let of_update =
        |(path, distance): (&String, &Distance)| Some((path.clone(), distance.of_update?));
    Ok(WriteReport {
        requantized: requantized.cloned().collect(),
        requantization_error: (distances.values())
            .map(|distance| distance.relative)
            .reduce(f32::max),
        update_errors: distances.iter().filter_map(of_update).collect(),
        ..report
    })
}

/// The linear layers of `source` that [`quantize`] writes in FP8 with these options, in the order of the model.
///
/// # Errors
/// Those of [`quantize`] that come before anything is written, except those of its target.
pub fn layers_to_quantize(
    source: &dyn Source,
    options: &QuantizeOptions,
) -> Result<Vec<Described>> {
    Ok(Plan::new(source, options)?.contents.layers)
}

/// What happens to each tensor.
struct Plan {
    contents: Contents,
    others: Vec<String>,
    /// The embedding that is the head's weight too.
    tied: Option<String>,
    default_dtype: DType,
    unmatched: Vec<String>,
}

impl Plan {
    fn new(source: &dyn Source, options: &QuantizeOptions) -> Result<Self> {
        let scheme = options.scheme.of_layers();
        let mut patterns = Patterns::parse(&options.ignore)?;
        let (mut contents, names) = take_scales(source, source.names(), &options.write)?;
        let default_dtype = model_dtype(source, &names);
        let described = |path: &str, dims: &[usize]| match *dims {
            [n, k] => Some(Described {
                path: path.to_string(),
                scheme,
                sizes: (n, k),
            }),
            _ => None,
        };
        let mut others = vec![];
        for name in names {
            let mut layer = None;
            if let Some((path, role)) = role(source, &name) {
                let ignored = patterns.matches(path)?;
                let head = options.head || source.is_fp8(&name);
                let chosen = role == Role::Linear || (role == Role::Head && head);
                if chosen && !ignored {
                    layer = described(path, &source.shape(&name).unwrap_or_default());
                }
            }
            match layer {
                Some(layer) => contents.layers.push(layer),
                None => others.push(name),
            }
        }
        let mut tied = None;
        let has_head = source.shape(&weight_name(HEAD)).is_some();
        if options.head && !has_head && !patterns.matches(HEAD)? {
            tied = embedding(source, &others);
            let shape = tied.as_ref().and_then(|name| source.shape(name));
            let head = shape.and_then(|dims| described(HEAD, &dims));
            contents.layers.extend(head);
        }
        if contents.layers.is_empty() {
            return Err(Error::NothingToConvert);
        }
        for layer in &contents.layers {
            scheme.check(layer.sizes, &layer.path, WAY_OUT)?;
            if options.scheme.needs_calibration() && options.input_amax(&layer.path).is_none() {
                return Err(Error::MissingAmax {
                    path: layer.path.clone(),
                });
            }
        }
        contents
            .layers
            .sort_by_cached_key(|layer| natural_order(&layer.path));
        name_others(source, &others, &mut contents);
        options.spelling.check(&contents)?;
        Ok(Self {
            contents,
            others,
            tied,
            default_dtype,
            unmatched: patterns.unmatched(),
        })
    }
}

/// The embedding that serves as the head of a model without one; None if the configuration does not tie them.
fn embedding(source: &dyn Source, others: &[String]) -> Option<String> {
    if let Some(other) = source.tied().get(&weight_name(HEAD)) {
        return Some(other.clone());
    }
    let config = source.config()?;
    let places = ["/tie_word_embeddings", "/text_config/tie_word_embeddings"];
    let told = places
        .iter()
        .find_map(|place| config.pointer(place)?.as_bool());
    // A model that leaves the key out has a default that is unknown here.
    if told != Some(true) {
        return None;
    }
    let mut names = others.iter();
    let embedding =
        |name: &&String| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    names.find(embedding).cloned()
}

/// Fails for models whose weights are `[in, out]`. Every FP8 file has a row of codes for each output.
fn check_order(source: &dyn Source) -> Result<()> {
    const TRANSPOSED: [&str; 4] = ["gpt2", "openai-gpt", "imagegpt", "decision_transformer"];
    let kind = source
        .config()
        .and_then(|config| config["model_type"].as_str());
    match kind.filter(|kind| TRANSPOSED.contains(kind)) {
        None => Ok(()),
        Some(kind) => Err(Error::TransposedWeights {
            model_type: kind.to_string(),
        }),
    }
}
