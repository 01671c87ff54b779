//! What the objectives of encoders share.

use super::data::Batch;
use super::error::{Error, Result};
use super::rows::Rows;
use crate::models::{Bert, Model};
use candle_core::{D, Device, Tensor};

/// The encoder of `model`, with the dropout of these rows.
pub(super) fn encoder<'a>(
    model: &'a Model,
    rows: &Rows,
    objective: &'static str,
) -> Result<&'a Bert> {
    model.set_dropout_seed(rows.dropout_seed);
    model.bert().ok_or(Error::Objective {
        objective,
        expected: "an encoder",
    })
}

/// The ids of a batch and the mask of its padding, both `[rows, tokens]`, where the longest text has `tokens`.
pub(super) fn inputs(batch: &Batch, device: &Device) -> Result<(Tensor, Tensor)> {
    let least = batch.padding.iter().min().copied().unwrap_or(0);
    let longest = (batch.context - least).max(1);
    let rows = batch.tokens.chunks(batch.context);
    let ids: Vec<u32> = rows.flat_map(|row| &row[..longest]).copied().collect();
    let used = batch.padding.iter().map(|padding| batch.context - padding);
    let mask: Vec<u32> = used
        .flat_map(|used| (0..longest).map(move |at| u32::from(at < used)))
        .collect();
    let shape = (batch.rows, longest);
    Ok((
        Tensor::from_vec(ids, shape, device)?,
        Tensor::from_vec(mask, shape, device)?,
    ))
}

/// How many rows of `scores`, `[rows, classes]`, have their largest value at the target.
pub(super) fn hits(scores: &Tensor, targets: &[u32]) -> Result<usize> {
    let best = scores.argmax(D::Minus1)?.to_vec1::<u32>()?;
    Ok(best.iter().zip(targets).filter(|(a, b)| a == b).count())
}
