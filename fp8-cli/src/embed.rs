//! `fp8 embed`: a vector for each text, from an encoder.

use crate::model::Source;
use crate::output::print;
use crate::texts;
use anyhow::{Result, bail};
use candle_core::Tensor;
use fp8::models::{Bert, Model, Pooling};
use serde_json::json;
use std::path::PathBuf;

/// Number of texts that run together.
const BATCH: usize = 32;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// The texts
    #[arg(required_unless_present = "data")]
    texts: Vec<String>,
    /// A file with one text per line; empty lines are skipped
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    data: Option<PathBuf>,
    /// Print one line of JSON for each text
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let texts = match &args.data {
        None => args.texts.clone(),
        Some(path) => {
            let text = texts::read(path)?;
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            lines.map(str::to_string).collect()
        }
    };
    if texts.is_empty() {
        let data = args.data.iter().map(|path| path.display().to_string());
        bail!("{} has no text", data.collect::<String>());
    }
    let (Model::Bert(model), _) = args.source.load()? else {
        bail!("{} is not an encoder", args.source.path().display());
    };
    let mut encoder = texts::Encoder::new(
        args.source.tokenizer()?,
        texts::longest_of(args.source.path(), &model)?,
    )?;
    let pooling = Pooling::of_dir(args.source.path())?;
    let normalizes = Pooling::normalizes(args.source.path())?;
    let mut ids = vec![];
    for text in &texts {
        let tokens = encoder.encode(text)?;
        if tokens.is_empty() {
            bail!("the text {text:?} has no tokens");
        }
        ids.push(tokens);
    }
    encoder.warn_of_cut();
    // Texts of similar length need little padding.
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&text| ids[text].len());
    let mut vectors = vec![vec![]; ids.len()];
    for batch in order.chunks(BATCH) {
        let rows: Vec<&[u32]> = batch.iter().map(|&text| ids[text].as_slice()).collect();
        for (&text, vector) in batch
            .iter()
            .zip(embed(&model, &rows, (pooling, normalizes))?)
        {
            vectors[text] = vector;
        }
    }
    if args.json {
        for (text, vector) in texts.iter().zip(&vectors) {
            let row = json!({ "text": text, "embedding": vector });
            print(&format!("{row}\n"))?;
        }
        return Ok(());
    }
    for vector in vectors {
        let numbers: Vec<String> = vector.iter().map(f32::to_string).collect();
        print(&format!("{}\n", numbers.join(" ")))?;
    }
    Ok(())
}

fn embed(
    model: &Bert,
    rows: &[&[u32]],
    (pooling, normalizes): (Pooling, bool),
) -> Result<Vec<Vec<f32>>> {
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
    let vectors = match normalizes {
        true => model.embed_with(&ids, &mask, pooling)?,
        false => model.pooled(&ids, &mask, pooling)?,
    };
    Ok(vectors.to_vec2()?)
}
