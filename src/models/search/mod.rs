//! Codes for FP8 files that keep the errors of a model's layers on samples small.

mod found;
mod inputs;
mod outliers;
mod retuning;
mod shifts;
mod stage;
mod task;
mod tokens;
mod walk;

pub use found::{FoundCodes, OutputError};

use crate::models::error::{Error, Result};
use crate::models::families::Model;
use crate::rewrite::{OnProgress, QuantizeOptions, Source, layers_to_quantize};
use candle_core::{Device, Tensor};
use fp8_files::search::SearchOptions;

/// The smallest number of tokens in all samples together: fewer say nothing about a model's inputs.
const LEAST_TOKENS: usize = 64;

/// Runs `model` on `samples` of token ids and chooses codes and scales for the layers that [`quantize`](crate::rewrite::quantize) with
/// `options` takes from `source`, so that the layers' outputs come close to those of the model in high precision. `model` is that of
/// `source`, in high precision and without an adapter ([`Model::merge_adapter`] adds one to the weights).
///
/// The samples go through the model block by block, once as in high precision and once with the codes found so far and with inputs cast
/// as a served model casts them. Each weight is then rounded to make up for the errors of the layers before it, for those of the cast of
/// its inputs, and for those of its own weights that are rounded already. The files have the same form, size and speed as without a
/// search.
///
/// What reads a residual divides it by its norm first. So in the layers that add to it, tokens count in inverse proportion to the square of
/// the residual that their block returns in high precision: in many models the first token and a few others have residuals so large that
/// codes would be chosen for them alone. In other layers, in experts and in a BERT, whose residuals are of one size, all tokens count the
/// same.
///
/// Where nothing but linear layers reads a norm's result, as in the Llama family, outliers among its features move into the weights of
/// these layers: the norm's weight is multiplied by powers of two, and theirs is divided by them, which changes nothing in high precision.
/// This is done only if it makes the errors of their outputs on the samples smaller, and no layer's error larger. E4M3 holds features of
/// very different sizes under one scale, so few models need it. The norms of a BERT are read by the residual too, and stay as they are.
///
/// Where inputs are cast under powers of two, as in MXFP8, the features of such a norm are also multiplied by factors between 0.7 and 1.4
/// where their large values are rounded less then, if all layers that read the norm are searched. In high precision this changes results by
/// roundings of f32.
///
/// Only layers in blocks are searched. Those outside are rounded plainly: the head (`with_head`), and the pooler and the classifier of a
/// BERT. So are experts that no token of the samples reaches. [`FoundCodes::plain`] lists them.
///
/// Memory: the model; its codes; for the samples, the values between two blocks and inside one; for one layer at a time, products of inputs
/// (8 bytes for each pair of the layer's input features) and their factors (20 more, and up to 36 while they are made).
///
/// ```no_run
/// use fp8::load::Checkpoint;
/// use fp8::models::{ModelOptions, Tokenizer, find_codes, open};
/// use fp8::rewrite::{self, QuantizeOptions, Scheme};
///
/// let model = open("SmolLM2", &ModelOptions::new())?;
/// let ids = Tokenizer::open("SmolLM2")?.encode(&std::fs::read_to_string("sample.txt")?, true)?;
/// let samples: Vec<&[u32]> = ids.chunks(512).take(16).collect();
///
/// let source = Checkpoint::open_dir("SmolLM2")?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken);
/// let found = find_codes(&model, &source, &samples, &options, &Default::default(), &mut rewrite::quiet)?;
/// let options = options.with_chosen(found.chosen);
/// rewrite::quantize(&source, "SmolLM2-FP8", &options, &mut rewrite::quiet)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Samples`] if there are fewer than 64 tokens, or a sample is longer than the model's positions; [`Error::NotSearchable`] for a
/// layer that holds codes already or has an adapter; those of [`layers_to_quantize`]; if the products of a layer's inputs are not finite
/// ([`Search`](fp8_files::Error::Search)); if `on_progress`, which is called before each block, cancels; and those of the model.
pub fn find_codes<S: AsRef<[u32]>>(
    model: &Model,
    source: &dyn Source,
    samples: &[S],
    options: &QuantizeOptions,
    search: &SearchOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<FoundCodes> {
    let samples = checked(samples, model.max_positions())?;
    let layers = layers_to_quantize(source, options)?;
    let task = task::Task::new(source, options, search, layers)?;
    let mut found = match model {
        Model::Llama(model) => walk::walk(model, &samples, &task, on_progress)?,
        Model::Bert(model) => walk::walk(model, &samples, &task, on_progress)?,
    };
    let codes = &found.chosen.codes;
    let paths = task.wanted.into_keys();
    found.plain = paths.filter(|path| !codes.contains_key(path)).collect();
    Ok(found)
}

/// The samples as `[1, tokens]` each.
fn checked<S: AsRef<[u32]>>(samples: &[S], positions: Option<usize>) -> Result<Vec<Tensor>> {
    let tokens: usize = samples.iter().map(|sample| sample.as_ref().len()).sum();
    if tokens < LEAST_TOKENS {
        let reason = format!(
            "{tokens} tokens in {} samples, expected at least {LEAST_TOKENS}, and thousands for good results",
            samples.len()
        );
        return Err(Error::Samples { reason });
    }
    let most = positions.unwrap_or(usize::MAX);
    let samples = samples.iter().map(AsRef::as_ref).enumerate();
    let samples = samples.filter(|(_, sample)| !sample.is_empty());
    let samples = samples.map(|(i, sample)| match sample.len() {
        len if len > most => Err(Error::Samples {
            reason: format!("sample {i} has {len} tokens, the model has positions for {most}"),
        }),
        len => Ok(Tensor::from_slice(sample, (1, len), &Device::Cpu)?),
    });
    samples.collect()
}
