//! `fp8 eval`: the perplexity of a language model on a text; the accuracy of an encoder on labelled texts or on queries.

mod encoder;

use crate::model::Source;
use crate::output::{print, print_json};
use crate::progress::{Bar, COUNT};
use crate::source::MAX_TEXT;
use crate::usage::{Usage, at_least};
use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use fp8::models::{CausalLm, Llama, Model, Tokenizer};
use fp8::read::read_bytes;
use rayon::prelude::*;
use serde_json::json;
use std::path::PathBuf;

/// Tokens that the model sees at once.
const WINDOW: usize = 512;
/// Texts that an encoder reads at once.
const BATCH: usize = 32;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// A text file; for an encoder JSON lines of `text` and `label`, or of `query` and `positive`
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Read only the first N tokens of it
    #[arg(long, value_name = "N", value_parser = at_least(2))]
    tokens: Option<usize>,
    /// Tokens that the model sees at once [default: 512, or the model's positions if it has fewer]
    #[arg(long, value_name = "N", value_parser = at_least(2))]
    window: Option<usize>,
    /// Texts, or queries with their texts, that an encoder reads at once; each query chooses among these texts
    /// [default: 32]
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    batch: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (model, _) = args.source.load()?;
    let model = match model {
        Model::Llama(model) => model,
        Model::Bert(model) => {
            let given = [
                ("--tokens", args.tokens.is_some()),
                ("--window", args.window.is_some()),
            ];
            if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(Usage(format!("{flag} is for language models")).into());
            }
            let batch = args.batch.unwrap_or(BATCH);
            return encoder::run(&args.source, model, &args.data, batch, args.json);
        }
        _ => bail!("{} cannot be measured", args.source.path().display()),
    };
    if args.batch.is_some() {
        return Err(Usage("--batch is for encoders".into()).into());
    }
    let bytes = read_bytes(&args.data, MAX_TEXT)?;
    let text = String::from_utf8_lossy(&bytes);
    let tokenizer = args.source.tokenizer()?;
    let ids = encode(&tokenizer, &text, args.tokens)?;
    if ids.len() < 2 {
        bail!("{} has fewer than two tokens", args.data.display());
    }
    let window = args.window;
    let mut bar = Bar::new("eval", COUNT)?;
    let (mut sum, mut counted, mut done) = (0f64, 0usize, 0usize);
    let window = each_window(&ids, &model, window, |window| {
        if bar.at("", done as u64, ids.len() as u64).is_break() {
            bail!("stopped after {done} of {} tokens", ids.len());
        }
        sum += window_nll(&model, window)?;
        counted += window.len() - 1;
        done += window.len();
        Ok(())
    })?;
    drop(bar);
    let nll = sum / counted as f64;
    if args.json {
        return print_json(&json!({
            "perplexity": nll.exp(),
            "nll_per_token": nll,
            "nll": sum,
            "tokens": counted,
            "window": window,
        }));
    }
    print(&format!(
        "perplexity {:.4}, {nll:.5} nats per token, {counted} tokens in windows of {}\n",
        nll.exp(),
        window
    ))
}

/// Calls `f` with each window: the tokens that the model sees at once, and the one that follows them. Returns the size of a window, which is
/// `window` if that is given.
pub fn each_window(
    ids: &[u32],
    model: &Llama,
    window: Option<usize>,
    mut f: impl FnMut(&[u32]) -> Result<()>,
) -> Result<usize> {
    let positions = model.max_positions().unwrap_or(usize::MAX);
    let window = window.unwrap_or(WINDOW.min(positions).max(2));
    // The last token of a window is only predicted, never read.
    if window - 1 > positions {
        bail!("--window is {window}, and the model has {positions} positions");
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocab_size()) {
        bail!(
            "the tokenizer gives token {id}, the model has {}: they do not belong together",
            model.vocab_size()
        );
    }
    // A last window of one token has nothing to predict.
    (ids.chunks(window).filter(|window| window.len() > 1)).try_for_each(&mut f)?;
    Ok(window)
}

/// The first tokens of a text. Tokenizes no more of a long text than needed.
fn encode(tokenizer: &Tokenizer, text: &str, tokens: Option<usize>) -> Result<Vec<u32>> {
    let Some(tokens) = tokens else {
        return Ok(tokenizer.encode(text, true)?);
    };
    // Tokens have some four bytes; the last tokens of a part may differ from those of the whole text.
    let mut part = tokens.saturating_add(16).saturating_mul(16).min(text.len());
    while !text.is_char_boundary(part) {
        part += 1;
    }
    let mut ids = tokenizer.encode(&text[..part], true)?;
    if part < text.len() && ids.len() < tokens.saturating_add(16) {
        ids = tokenizer.encode(text, true)?;
    }
    ids.truncate(tokens);
    Ok(ids)
}

/// The sum of -ln p over all tokens but the first.
fn window_nll(model: &Llama, ids: &[u32]) -> Result<f64> {
    let input = Tensor::from_slice(&ids[..ids.len() - 1], (1, ids.len() - 1), model.device())?;
    let logits = model.forward(&input)?.to_dtype(DType::F32)?.flatten_all()?;
    let logits = logits.to_vec1::<f32>()?;
    let rows: Vec<f64> = logits
        .par_chunks(model.vocab_size())
        .zip(&ids[1..])
        .map(|(logits, target)| nll(logits, *target as usize))
        .collect();
    // Summed in order, so that threads do not change the result.
    let sum: f64 = rows.iter().sum();
    if !sum.is_finite() {
        bail!("the logits are not finite");
    }
    Ok(sum)
}

/// -ln p of a token by its logits.
pub fn nll(logits: &[f32], target: usize) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    largest + sum.ln() - f64::from(logits[target])
}
