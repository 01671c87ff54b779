//! Pieces of documents in rows.

use std::ops::Range;

/// Rows that may still take a piece. More of them fill rows a little better, and make packing slower.
const OPEN: usize = 64;

/// A row of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    /// Pieces of documents: ranges of the dataset's tokens. They fill at most the row.
    pub pieces: Vec<Range<usize>>,
    /// The class.
    pub label: Option<u32>,
}

impl Row {
    /// Tokens that are not padding.
    pub fn used(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }
}

/// Cuts a document into pieces of `context` tokens; only the last may be shorter.
pub(super) fn cut(document: Range<usize>, context: usize) -> impl Iterator<Item = Range<usize>> {
    let end = document.end;
    let starts = document.step_by(context);
    starts.map(move |start| start..end.min(start + context))
}

/// Places pieces, each of at most `context` tokens, in rows.
///
/// Pieces come in their order. Each goes into the open row in which it leaves the least room (the first of equals); where it fits into
/// none, it opens a new row. A full row closes; of more than [`OPEN`] open rows, the one with the least room does (the first of equals).
/// Rows keep the order in which they were opened.
pub(super) fn pack(pieces: impl Iterator<Item = Range<usize>>, context: usize) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![];
    // Positions of rows, and their room.
    let mut open: Vec<(usize, usize)> = vec![];
    for piece in pieces {
        let len = piece.len();
        let fits = open
            .iter()
            .enumerate()
            .filter(|(_, (_, room))| *room >= len);
        match fits.min_by_key(|(_, (_, room))| *room) {
            Some((at, _)) => {
                let (row, room) = &mut open[at];
                rows[*row].pieces.push(piece);
                *room -= len;
                if *room == 0 {
                    open.remove(at);
                }
            }
            None => {
                if len < context {
                    open.push((rows.len(), context - len));
                }
                rows.push(alone(piece, None));
                if open.len() > OPEN {
                    let rooms = open.iter().enumerate();
                    let fullest = rooms.min_by_key(|(_, (_, room))| *room);
                    fullest.map(|(at, _)| at).map(|at| open.remove(at));
                }
            }
        }
    }
    rows
}

/// A row of one piece.
pub(super) fn alone(piece: Range<usize>, label: Option<u32>) -> Row {
    Row {
        pieces: vec![piece],
        label,
    }
}
