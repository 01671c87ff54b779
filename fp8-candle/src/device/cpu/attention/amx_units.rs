//! The units of processors with AMX: pairs of bf16, multiplied by tiles.

use super::cast::RowCast;
use super::layout::{Panel, Rows, Sums};
use super::source::{Tokens, View};
use super::tile_amx::{self, Session};
use super::units::Units;
use super::x86_units::Bf16Units;
use fp8_core::{Isa, IsaLevel};
use std::ops::Range;

/// Pairs of bf16 that are packed as for `vdpbf16ps`.
#[derive(Clone, Copy)]
pub(super) struct AmxUnits(Bf16Units);

impl AmxUnits {
    pub(super) fn of(isa: Isa) -> Option<Self> {
        let units = Bf16Units::of(isa)?;
        (isa.level() == IsaLevel::Amx).then_some(Self(units))
    }
}

impl Units for AmxUnits {
    const STEP: usize = Bf16Units::STEP;
    const ROWS: usize = tile_amx::ROWS;
    const TOGETHER: usize = tile_amx::DEPTH;

    type Session = Session;

    fn session(self) -> Session {
        // SAFETY: units exist only where their instructions do; a task makes one session and computes no products of matrices.
        unsafe { Session::new() }
    }

    fn multiply(
        self,
        session: &mut Session,
        rows: usize,
        a: Rows<'_>,
        b: Panel<'_>,
        sums: Sums<'_>,
    ) {
        session.multiply(rows, a, b, sums);
    }

    fn takes_f32(self, view: &View<'_>) -> bool {
        self.0.takes_f32(view)
    }

    fn pairs<'a>(
        self,
        view: &View<'a>,
        at: [usize; 2],
        tokens: Range<usize>,
    ) -> Option<(&'a [u32], usize)> {
        self.0.pairs(view, at, tokens)
    }

    fn decode_pairs(
        self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
    ) -> bool {
        self.0.decode_pairs(view, at, tokens, to)
    }

    fn round_to_pairs(self, cast: RowCast, rows: Tokens<'_>, to: &mut [u32]) -> bool {
        self.0.round_to_pairs(cast, rows, to)
    }

    fn cells(self, row: &[f32], cells: &mut [u32]) {
        self.0.cells(row, cells);
    }

    fn cells_in_place(self, row: &mut [f32]) {
        self.0.cells_in_place(row);
    }

    fn columns(self, x: &[f32], y: &[f32], cells: &mut [u32], stride: usize) {
        self.0.columns(x, y, cells, stride);
    }

    fn columns_of_cells(self, x: &[u32], y: &[u32], cells: &mut [u32]) {
        self.0.columns_of_cells(x, y, cells);
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        self.0.transpose(from, stride, to);
    }
}
