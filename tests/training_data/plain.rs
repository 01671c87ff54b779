//! What rows are, written without regard for time and memory.

use crate::support::RowOf;
use fp8::training::IGNORED;
use fp8_core::philox4x32_10;

/// A token, and whether it is to be predicted.
pub type Marked = (u32, bool);

/// Pieces of a document in which there is something to predict.
pub fn pieces(document: &[Marked], context: usize) -> Vec<Vec<Marked>> {
    let mut pieces = vec![vec![]];
    for &token in document {
        if pieces[pieces.len() - 1].len() == context {
            pieces.push(vec![]);
        }
        let last = pieces.len() - 1;
        pieces[last].push(token);
    }
    pieces.retain(|piece| piece.iter().skip(1).any(|(_, predicted)| *predicted));
    pieces
}

/// The row of these pieces.
pub fn row(pieces: &[Vec<Marked>], context: usize, padding: u32) -> RowOf {
    let mut row = RowOf {
        tokens: vec![],
        targets: vec![],
        segments: vec![],
        padding: 0,
        label: None,
    };
    for piece in pieces {
        for (at, (token, _)) in piece.iter().enumerate() {
            row.tokens.push(*token);
            row.targets.push(match piece.get(at + 1) {
                Some((next, true)) => *next,
                _ => IGNORED,
            });
        }
        row.segments.push(piece.len());
    }
    while row.tokens.len() < context {
        row.tokens.push(padding);
        row.targets.push(IGNORED);
        row.padding += 1;
    }
    if row.padding > 0 {
        row.segments.push(row.padding);
    }
    row
}

/// Pieces in rows: each in the open row that it leaves the least room in.
pub fn packed(pieces: Vec<Vec<Marked>>, context: usize) -> Vec<Vec<Vec<Marked>>> {
    let mut rows: Vec<(Vec<Vec<Marked>>, bool)> = vec![];
    let room = |row: &[Vec<Marked>]| context - row.iter().map(Vec::len).sum::<usize>();
    for piece in pieces {
        let mut best: Option<usize> = None;
        for (at, (row, open)) in rows.iter().enumerate() {
            let better = best.is_none_or(|best| room(row) < room(&rows[best].0));
            if *open && room(row) >= piece.len() && better {
                best = Some(at);
            }
        }
        match best {
            Some(at) => rows[at].0.push(piece),
            None => rows.push((vec![piece], true)),
        }
        for (row, open) in &mut rows {
            *open &= room(row) > 0;
        }
        if rows.iter().filter(|(_, open)| *open).count() > 64 {
            let mut fullest: Option<usize> = None;
            for (at, (row, open)) in rows.iter().enumerate() {
                if *open && fullest.is_none_or(|fullest| room(row) < room(&rows[fullest].0)) {
                    fullest = Some(at);
                }
            }
            rows[fullest.expect("an open row")].1 = false;
        }
    }
    rows.into_iter().map(|(row, _)| row).collect()
}

/// The rows of an epoch: in the order of their random words.
pub fn shuffled(rows: &[RowOf], seed: u64, epoch: u64) -> Vec<RowOf> {
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    let mut numbered: Vec<([u32; 4], RowOf)> = vec![];
    for (at, row) in rows.iter().enumerate() {
        let ([a, b], [c, d]) = (halves(at as u64), halves(epoch));
        let words = philox4x32_10([a, b, c, d], halves(seed));
        numbered.push((words, row.clone()));
    }
    numbered.sort_by_key(|(words, _)| *words);
    numbered.into_iter().map(|(_, row)| row).collect()
}
