//! Elements that stand in another order in a file than in a model.

use super::catalogue::Stored;
use crate::error::{Error, Result};

/// The elements of scales that stand in tiles of 128x4.
pub(super) fn untile(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    if values.is_empty() {
        return vec![];
    }
    let across = cols.div_ceil(4);
    let at = |r: usize, c: usize| {
        let tile = r / 128 * across + c / 4;
        let (r, c) = (r % 128, c % 4);
        tile * 512 + r % 32 * 16 + r / 32 * 4 + c
    };
    let elements = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c)));
    elements.map(|(r, c)| values[at(r, c)]).collect()
}

/// For each row of the model the row of the file.
pub(super) fn rotary_rows(rows: usize, heads: usize, stored: &Stored) -> Result<Vec<usize>> {
    let head = rows.checked_div(heads).unwrap_or_default();
    if head * heads != rows || !head.is_multiple_of(2) {
        return Err(Error::TensorShape {
            tensor: stored.name.clone(),
            got: vec![rows],
            expected: format!("rows in pairs for {heads} heads"),
        });
    }
    let row = |at: usize| at / head * head + at % head % (head / 2) * 2 + at % head / (head / 2);
    Ok((0..rows).map(row).collect())
}

pub(super) fn take_rows<T: Copy>(
    values: &[T],
    rows: usize,
    heads: usize,
    stored: &Stored,
) -> Result<Vec<T>> {
    // There may be many rows of nothing.
    if values.is_empty() {
        return Ok(vec![]);
    }
    let order = rotary_rows(rows, heads, stored)?;
    let width = values.len() / rows.max(1);
    let rows = order
        .into_iter()
        .flat_map(|row| &values[row * width..(row + 1) * width]);
    Ok(rows.copied().collect())
}
