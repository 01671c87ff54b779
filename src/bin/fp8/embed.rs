//! `fp8 embed`: one vector for each text, by an encoder.

use crate::model::Source;
use crate::output::{print, print_json};
use anyhow::{Context, Result, anyhow, bail};
use candle_core::Tensor;
use fp8::models::{Bert, Model, Pooling};
use serde_json::{Value, json};
use std::path::PathBuf;
use tokenizers::{PostProcessor, Tokenizer, TruncationParams};

/// Texts that run together.
const BATCH: usize = 32;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// The texts
    #[arg(required_unless_present = "data")]
    texts: Vec<String>,
    /// A file with a text in each line; empty lines are passed over
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    data: Option<PathBuf>,
    /// Print texts and vectors as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let texts = match &args.data {
        None => args.texts.clone(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            lines.map(str::to_string).collect()
        }
    };
    if texts.is_empty() {
        let data = args.data.iter().map(|path| path.display().to_string());
        bail!("{} has no text", data.collect::<String>());
    }
    let (Model::Bert(model), _) = args.source.load()? else {
        bail!("{} is no encoder", args.source.path().display());
    };
    let tokenizer = tokenizer(args, &model)?;
    let pooling = Pooling::of_dir(args.source.path())?;
    let mut ids = vec![];
    for text in &texts {
        let encoding = tokenizer.encode_fast(text.as_str(), true);
        let encoding = encoding.map_err(|error| anyhow!("{error}"))?;
        if encoding.get_ids().is_empty() {
            bail!("the text {text:?} has no tokens");
        }
        ids.push(encoding.get_ids().to_vec());
    }
    // Texts of about one length have little padding.
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&text| ids[text].len());
    let mut vectors = vec![vec![]; ids.len()];
    for batch in order.chunks(BATCH) {
        let rows: Vec<&[u32]> = batch.iter().map(|&text| ids[text].as_slice()).collect();
        for (&text, vector) in batch.iter().zip(embed(&model, &rows, pooling)?) {
            vectors[text] = vector;
        }
    }
    if args.json {
        let rows = texts.iter().zip(&vectors);
        let rows = rows.map(|(text, vector)| json!({ "text": text, "embedding": vector }));
        return print_json(&Value::Array(rows.collect()));
    }
    for vector in vectors {
        let numbers: Vec<String> = vector.iter().map(f32::to_string).collect();
        print(&format!("{}\n", numbers.join(" ")))?;
    }
    Ok(())
}

/// Cuts texts at the length that the model was trained for.
fn tokenizer(args: &Args, model: &Bert) -> Result<Tokenizer> {
    let path = args.source.path().join("sentence_bert_config.json");
    let positions = model.config().max_position_embeddings;
    let trained = match std::fs::read_to_string(&path) {
        Ok(text) => {
            let json: Value =
                serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            json["max_seq_length"]
                .as_u64()
                .map(|length| length as usize)
        }
        Err(_) => None,
    };
    let mut tokenizer = args.source.tokenizer()?.inner().clone();
    let longest = trained.unwrap_or(positions).min(positions);
    let added = tokenizer
        .get_post_processor()
        .map_or(0, |processor| processor.added_tokens(false));
    if longest <= added {
        bail!("texts of {longest} tokens have no room beside the {added} that are always there");
    }
    tokenizer
        .with_truncation(Some(TruncationParams {
            max_length: longest,
            ..TruncationParams::default()
        }))
        .map_err(|error| anyhow!("{error}"))?;
    Ok(tokenizer)
}

fn embed(model: &Bert, rows: &[&[u32]], pooling: Pooling) -> Result<Vec<Vec<f32>>> {
    let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let (mut ids, mut mask) = (vec![], vec![]);
    for row in rows {
        ids.extend_from_slice(row);
        ids.resize(ids.len() + longest - row.len(), 0);
        mask.extend(std::iter::repeat_n(1u32, row.len()));
        mask.resize(ids.len(), 0);
    }
    let shape = (rows.len(), longest);
    let ids = Tensor::from_vec(ids, shape, model.device())?;
    let mask = Tensor::from_vec(mask, shape, model.device())?;
    Ok(model.embed_with(&ids, &mask, pooling)?.to_vec2()?)
}
