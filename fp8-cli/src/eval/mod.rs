//! `fp8 eval`: the perplexity of a language model on a text; the accuracy of an encoder on labelled texts or on queries.

mod encoder;

use crate::model::Source;
use crate::output::{print, print_json};
use crate::progress::{Bar, COUNT};
use crate::texts::{Piece, Pieces};
use crate::usage::{Usage, at_least, first_given};
use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use fp8::models::{CausalLm, Llama, Model};
use rayon::prelude::*;
use serde_json::json;
use std::path::PathBuf;

/// Texts that an encoder reads at once.
const BATCH: usize = 32;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// A text file, or JSON lines as `fp8 train` takes them; for an encoder JSON lines of `text` and `label`, or of `query` and `positive`
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Read only the first N tokens of plain text
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
                (args.tokens.is_some(), "--tokens"),
                (args.window.is_some(), "--window"),
            ];
            if let Some(flag) = first_given(given) {
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
    let tokenizer = args.source.tokenizer()?;
    let text = Pieces::open(&args.data, &tokenizer, &model, args.window, args.tokens)?;
    let mut bar = Bar::new("eval", COUNT)?;
    let (mut sum, mut counted, mut done) = (0f64, 0usize, 0usize);
    let all: usize = text.pieces.iter().map(|piece| piece.ids.len()).sum();
    for piece in &text.pieces {
        if bar.at("", done as u64, all as u64).is_break() {
            bail!("stopped after {done} of {all} tokens");
        }
        sum += piece_nll(&model, piece)?;
        counted += piece.count();
        done += piece.ids.len();
    }
    drop(bar);
    let window = text.window;
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

/// The logits of a model for the tokens of a piece from the second on.
pub fn logits(model: &Llama, piece: &Piece) -> Result<Vec<f32>> {
    let input = &piece.ids[..piece.ids.len() - 1];
    let input = Tensor::from_slice(input, (1, input.len()), model.device())?;
    let logits = model.forward(&input)?.to_dtype(DType::F32)?;
    Ok(logits.flatten_all()?.to_vec1()?)
}

/// The sum of -ln p over all tokens to predict.
fn piece_nll(model: &Llama, piece: &Piece) -> Result<f64> {
    let logits = logits(model, piece)?;
    let targets = piece.ids.par_iter().zip(&piece.predicted).skip(1);
    let rows: Vec<f64> = logits
        .par_chunks(model.vocab_size())
        .zip(targets)
        .filter_map(|(logits, (target, predicted))| {
            predicted.then(|| nll(logits, *target as usize))
        })
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
