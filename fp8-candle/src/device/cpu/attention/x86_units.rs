//! The units of x86: pairs of bf16, and f32 in vectors of 512 and 256 bits.

use super::super::gemm::transpose_16;
use super::cast::RowCast;
use super::f32_units::{F32Kernels, F32Units, transpose_from};
use super::layout::{PANEL, Panel, Rows, Sums};
use super::source::{Tokens, View};
use super::tile;
use super::units::Units;
use super::words::{self, Table};
use fp8_core::{Isa, IsaLevel};
use std::arch::x86_64::*;
use std::ops::Range;

/// Pairs of bf16, multiplied by `vdpbf16ps`.
#[derive(Clone, Copy)]
pub(super) struct Bf16Units(());

impl Bf16Units {
    pub(super) fn of(isa: Isa) -> Option<Self> {
        let has = matches!(isa.level(), IsaLevel::Avx512Bf16 | IsaLevel::Amx);
        has.then_some(Self(()))
    }
}

impl Units for Bf16Units {
    const STEP: usize = 2;
    const ROWS: usize = 12;

    type Session = ();

    fn session(self) {}

    fn multiply(self, (): &mut (), rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        // SAFETY: units exist only where their instructions do.
        unsafe { tile::bf16(rows, a, b, sums) }
    }

    fn takes_f32(self, _: &View<'_>) -> bool {
        false
    }

    fn pairs<'a>(
        self,
        view: &View<'a>,
        at: [usize; 2],
        tokens: Range<usize>,
    ) -> Option<(&'a [u32], usize)> {
        view.bf16_pairs(at, tokens)
    }

    fn decode_pairs(
        self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
    ) -> bool {
        let Some((format, rows)) = view.code_rows(at, tokens) else {
            return false;
        };
        // SAFETY: as above.
        Table::of(format).is_some_and(|table| unsafe { words::decode(table, rows, to) })
    }

    fn round_to_pairs(self, cast: RowCast, rows: Tokens<'_>, to: &mut [u32]) -> bool {
        // SAFETY: as above.
        unsafe { words::round(cast, rows, to) }
    }

    fn cells(self, row: &[f32], cells: &mut [u32]) {
        // SAFETY: as above.
        unsafe { bf16_cells(row, cells) }
    }

    fn cells_in_place(self, row: &mut [f32]) {
        // SAFETY: as above.
        unsafe { bf16_cells_in_place(row) }
    }

    fn columns(self, x: &[f32], y: &[f32], cells: &mut [u32], stride: usize) {
        // SAFETY: as above.
        unsafe { bf16_columns(x, y, cells, stride) }
    }

    fn columns_of_cells(self, x: &[u32], y: &[u32], cells: &mut [u32]) {
        // SAFETY: as above.
        unsafe { words::columns(x, y, cells) }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        // SAFETY: as above.
        unsafe { transpose_512(from, stride, to) }
    }
}

/// 32 values as sixteen cells.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn neighbours(values: &[f32; PANEL]) -> __m512i {
    // SAFETY: the array is two vectors; both types of the result have 64 bytes.
    unsafe {
        let (low, high) = (values.as_ptr(), values.as_ptr().add(16));
        let pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
        std::mem::transmute::<__m512bh, __m512i>(pairs)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_cells(row: &[f32], cells: &mut [u32]) {
    let mut buffer = [0.0; PANEL];
    for (index, cells) in cells.chunks_mut(PANEL / 2).enumerate() {
        let pairs = neighbours(chunk(row, index * PANEL, &mut buffer));
        let mask = ((1u32 << cells.len()) - 1) as u16;
        // SAFETY: the mask has a bit for each cell of the chunk.
        unsafe { _mm512_mask_storeu_epi32(cells.as_mut_ptr().cast(), mask, pairs) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_cells_in_place(row: &mut [f32]) {
    for index in 0..row.len() / PANEL {
        let values = row[index * PANEL..].first_chunk().expect("whole chunks");
        let pairs = neighbours(values);
        let to = &mut row[index * PANEL / 2..][..PANEL / 2];
        // SAFETY: sixteen values are one vector.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_columns(x: &[f32], y: &[f32], cells: &mut [u32], stride: usize) {
    let (mut x_buffer, mut y_buffer) = ([0.0; PANEL], [0.0; PANEL]);
    for index in 0..x.len().max(y.len()).div_ceil(PANEL) {
        let cells = &mut cells[index * stride..][..PANEL];
        let x = chunk(x, index * PANEL, &mut x_buffer);
        let y = chunk(y, index * PANEL, &mut y_buffer);
        for half in [0, PANEL / 2] {
            // SAFETY: the chunks are two vectors each, and so is that of the cells; eight pairs have 32 bytes.
            unsafe {
                let wide = |values: &[f32; PANEL]| {
                    let values = _mm512_loadu_ps(values.as_ptr().add(half));
                    let narrow =
                        std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
                    _mm512_cvtepu16_epi32(narrow)
                };
                let pairs = _mm512_or_si512(wide(x), _mm512_slli_epi32::<16>(wide(y)));
                _mm512_storeu_si512(cells.as_mut_ptr().add(half).cast(), pairs);
            }
        }
    }
}

/// `values` cut or extended by zeros to one chunk.
#[inline]
fn chunk<'a>(values: &'a [f32], at: usize, buffer: &'a mut [f32; PANEL]) -> &'a [f32; PANEL] {
    let values = values.get(at..).unwrap_or(&[]);
    match values.first_chunk() {
        Some(chunk) => chunk,
        None => {
            *buffer = [0.0; PANEL];
            buffer[..values.len()].copy_from_slice(values);
            buffer
        }
    }
}

/// f32 in vectors of 512 bits.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn units(isa: Isa, round: bool) -> Option<F32Units<Self>> {
        let has = !matches!(isa.level(), IsaLevel::Portable | IsaLevel::Avx2);
        has.then_some(F32Units::new(Self(()), round))
    }
}

impl F32Kernels for Avx512 {
    const ROWS: usize = 12;

    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        // SAFETY: kernels exist only where their instructions do.
        unsafe { tile::avx512(rows, a, b, sums) }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        // SAFETY: as above.
        unsafe { transpose_512(from, stride, to) }
    }
}

/// f32 in vectors of 256 bits.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn units(isa: Isa, round: bool) -> Option<F32Units<Self>> {
        let has = isa.level() != IsaLevel::Portable;
        has.then_some(F32Units::new(Self(()), round))
    }
}

impl F32Kernels for Avx2 {
    const ROWS: usize = 6;

    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        // SAFETY: kernels exist only where their instructions do.
        unsafe { tile::avx2(rows, a, b, sums) }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        // SAFETY: kernels exist only where their instructions do.
        unsafe { transpose_256(from, stride, to) }
    }
}

/// The transpose of 8 rows of 8 cells.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8(rows: [__m256; 8]) -> [__m256; 8] {
    // Pairs of rows, then fours of each half, then whole columns.
    let low = |i: usize| _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    let high = |i: usize| _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    let fours = |first: usize| -> [__m256; 4] {
        let [a, b] = [low(first), low(first + 2)];
        let [c, d] = [high(first), high(first + 2)];
        [
            _mm256_shuffle_ps::<0x44>(a, b),
            _mm256_shuffle_ps::<0xEE>(a, b),
            _mm256_shuffle_ps::<0x44>(c, d),
            _mm256_shuffle_ps::<0xEE>(c, d),
        ]
    };
    let (first, second) = (fours(0), fours(4));
    std::array::from_fn(|i| match i {
        0..4 => _mm256_permute2f128_ps::<0x20>(first[i], second[i]),
        _ => _mm256_permute2f128_ps::<0x31>(first[i - 4], second[i - 4]),
    })
}

#[target_feature(enable = "avx2")]
fn transpose_256(from: &[u32], stride: usize, to: &mut [u32]) {
    let steps = to.len() / PANEL;
    let whole = steps / 8 * 8;
    assert!(steps <= stride && from.len() >= (PANEL - 1) * stride + steps);
    for step in (0..whole).step_by(8) {
        for part in (0..PANEL).step_by(8) {
            // SAFETY: rows `part..part + 8` hold steps `step..step + 8`, and `to` holds `part..part + 8` of each.
            unsafe {
                let row = |row: usize| {
                    _mm256_loadu_ps(from.as_ptr().add((part + row) * stride + step).cast())
                };
                let columns = transpose_8(std::array::from_fn(row));
                for (i, column) in columns.into_iter().enumerate() {
                    let to = to.as_mut_ptr().add((step + i) * PANEL + part);
                    _mm256_storeu_ps(to.cast(), column);
                }
            }
        }
    }
    transpose_from(whole, from, stride, to);
}

#[target_feature(enable = "avx512f")]
fn transpose_512(from: &[u32], stride: usize, to: &mut [u32]) {
    let steps = to.len() / PANEL;
    let whole = steps / 16 * 16;
    assert!(steps <= stride && from.len() >= (PANEL - 1) * stride + steps);
    for step in (0..whole).step_by(16) {
        for half in [0, 16] {
            // SAFETY: rows `half..half + 16` hold steps `step..step + 16`, and `to` holds `half..half + 16` of each.
            unsafe {
                let row = |row: usize| {
                    _mm512_loadu_si512(from.as_ptr().add((half + row) * stride + step).cast())
                };
                let columns = transpose_16(std::array::from_fn(row));
                for (i, column) in columns.into_iter().enumerate() {
                    let to = to.as_mut_ptr().add((step + i) * PANEL + half);
                    _mm512_storeu_si512(to.cast(), column);
                }
            }
        }
    }
    transpose_from(whole, from, stride, to);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_transposes_alike() {
        for (steps, stride) in [(1, 1), (7, 9), (8, 8), (17, 20), (64, 64), (33, 70)] {
            let from: Vec<u32> = (0..(PANEL * stride) as u32).collect();
            let mut expected = vec![0; steps * PANEL];
            transpose_from(0, &from, stride, &mut expected);
            let isa = Isa::best();
            let mut to = vec![0; steps * PANEL];
            if let Some(units) = Avx2::units(isa, false) {
                units.transpose(&from, stride, &mut to);
                assert_eq!(to, expected, "{steps} of {stride}");
            }
            to.fill(0);
            if let Some(units) = Avx512::units(isa, false) {
                units.transpose(&from, stride, &mut to);
                assert_eq!(to, expected, "{steps} of {stride}");
            }
        }
    }
}
