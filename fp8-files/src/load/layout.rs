//! Elements whose order differs between a file and a model.

use crate::error::{Error, Result};

/// The elements of scales that are stored in tiles of 128x4.
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

/// For each row of the model its row in the tensor `name` of the file.
pub(super) fn rotary_rows(rows: usize, heads: usize, name: &str) -> Result<Vec<usize>> {
    let head = rows.checked_div(heads).unwrap_or_default();
    if head * heads != rows || !head.is_multiple_of(2) {
        return Err(Error::TensorShape {
            tensor: name.to_string(),
            got: vec![rows],
            expected: format!("rows in pairs for {heads} heads"),
        });
    }
    let row = |at: usize| at / head * head + at % head % (head / 2) * 2 + at % head / (head / 2);
    Ok((0..rows).map(row).collect())
}

/// The elements of the tensor `name` with its rows in the model's order.
pub(super) fn take_rows<T: Copy>(
    values: &[T],
    rows: usize,
    heads: usize,
    name: &str,
) -> Result<Vec<T>> {
    // An empty tensor may have many rows.
    if values.is_empty() {
        return Ok(vec![]);
    }
    let order = rotary_rows(rows, heads, name)?;
    let width = values.len() / rows.max(1);
    let rows = order
        .into_iter()
        .flat_map(|row| &values[row * width..(row + 1) * width]);
    Ok(rows.copied().collect())
}
