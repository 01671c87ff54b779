//! Few rows by panels of packed codes in the order in which AMX sums, without its tiles: they read operands from memory, where decoded
//! codes would have to be written first.
//!
//! `tdpbf16ps` multiplies 32 indices of the sum at a time: it adds the products of even indices to one sum and those of odd indices to
//! another, each with one rounding and starting with zero, then both together, and the result to the tile. (It takes subnormal numbers as
//! zero; products of FP8 values and their sums are never that small, nor with scales folded into them, see `exponents.rs`.)

use super::decoder::{Decoder, added_to_pairs, prefetch};
use super::kernel::{PackedPanel, Sums};
use super::layout::{DEPTH, PANEL, SLICE_STRIDE};
use std::arch::x86_64::*;

/// The most rows for which this is faster than tiles.
pub(super) const ROWS: usize = 2;

/// How many panels are summed at a time: enough sums to hide the latency of additions.
pub(super) const fn panels_at_once(rows: usize) -> usize {
    if rows == 1 { 2 } else { 1 }
}

/// Computes the sums of `rows` rows by some panels of 32 columns, or adds to them.
///
/// `a`: rows of a slice packed as A, from the first index of the sum on; `packed`: up to [`panels_at_once`] neighbouring panels from that
/// index on, of a length that is a multiple of [`DEPTH`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn multiply(
    decoder: &Decoder,
    rows: usize,
    a: &[u16],
    packed: &[PackedPanel<'_>],
    sums: Sums<'_>,
    accumulate: bool,
) {
    macro_rules! tile {
        ($($rows:literal x $panels:literal)+) => {
            match (rows, packed.len()) {
                $(
                    ($rows, $panels) => {
                        let panels: [_; $panels] = std::array::from_fn(|panel| packed[panel]);
                        if panels[0].added.is_empty() {
                            tile::<$rows, $panels, false>(decoder, a, panels, sums, accumulate);
                        } else {
                            tile::<$rows, $panels, true>(decoder, a, panels, sums, accumulate);
                        }
                    }
                )+
                (rows, panels) => unreachable!("a tile of {rows} rows by {panels} panels"),
            }
        };
    }
    tile!(1 x 1 1 x 2 2 x 1);
}

/// The values of even and of odd indices of pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts(pairs: __m512i) -> [__m512; 2] {
    let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
    [_mm512_slli_epi32::<16>(pairs), odd].map(|bits| _mm512_castsi512_ps(bits))
}

/// `R` rows by `P` panels, to whose exponents something is added where `SCALED`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn tile<const R: usize, const P: usize, const SCALED: bool>(
    decoder: &Decoder,
    a: &[u16],
    panels: [PackedPanel<'_>; P],
    sums: Sums<'_>,
    accumulate: bool,
) {
    const PAIR: usize = 2 * PANEL;
    let steps = panels[0].codes.len() / (PANEL * DEPTH);
    let whole = |panel: &PackedPanel<'_>| panel.codes.len() == steps * PANEL * DEPTH;
    assert!(R > 0 && panels.iter().all(whole));
    assert!(steps == 0 || (R - 1) * SLICE_STRIDE + steps * DEPTH <= a.len());
    let zero = [[[_mm512_setzero_ps(); 2]; R]; P];
    let mut total = zero;
    let at = |panel: usize, row: usize, half: usize| row * sums.stride + panel * PANEL + half * 16;
    assert!(at(P - 1, R - 1, 1) + 16 <= sums.values.len());
    if accumulate {
        for (panel, total) in total.iter_mut().enumerate() {
            for (row, total) in total.iter_mut().enumerate() {
                for (half, total) in total.iter_mut().enumerate() {
                    // SAFETY: 16 sums, by the assertion on the last ones.
                    *total =
                        unsafe { _mm512_loadu_ps(sums.values.as_ptr().add(at(panel, row, half))) };
                }
            }
        }
    }
    for step in 0..steps {
        let (mut even, mut odd) = (zero, zero);
        let mut added = [[_mm512_setzero_si512(); 2]; P];
        if SCALED {
            for (panel, added) in panels.iter().zip(&mut added) {
                *added = added_to_pairs(panel.added_at(step));
            }
        }
        for pair in step * (DEPTH / 2)..(step + 1) * (DEPTH / 2) {
            let a = std::array::from_fn::<_, R, _>(|row| {
                // SAFETY: two elements, by the assertion on the last row and step.
                let a = unsafe { a.as_ptr().add(row * SLICE_STRIDE + 2 * pair).cast::<i32>() };
                // SAFETY: as above.
                parts(_mm512_set1_epi32(unsafe { a.read_unaligned() }))
            });
            for (panel, packed) in panels.iter().enumerate() {
                // SAFETY: each panel holds the codes of `steps * DEPTH / 2` pairs.
                let codes = unsafe {
                    let codes = packed.codes.as_ptr().add(pair * PAIR);
                    prefetch(codes, AHEAD / P);
                    _mm512_loadu_si512(codes.cast())
                };
                let (left, right) = match SCALED {
                    true => decoder.decode_scaled(codes, added[panel]),
                    false => decoder.decode(codes),
                };
                for (half, b) in [parts(left), parts(right)].into_iter().enumerate() {
                    for (row, a) in a.iter().enumerate() {
                        let (even, odd) = (&mut even[panel][row][half], &mut odd[panel][row][half]);
                        *even = _mm512_fmadd_ps(a[0], b[0], *even);
                        *odd = _mm512_fmadd_ps(a[1], b[1], *odd);
                    }
                }
            }
        }
        for panel in 0..P {
            for row in 0..R {
                for half in 0..2 {
                    let step = _mm512_add_ps(even[panel][row][half], odd[panel][row][half]);
                    total[panel][row][half] = _mm512_add_ps(total[panel][row][half], step);
                }
            }
        }
    }
    for (panel, total) in total.iter().enumerate() {
        for (row, total) in total.iter().enumerate() {
            for (half, total) in total.iter().enumerate() {
                // SAFETY: 16 sums, by the assertion on the last ones.
                unsafe {
                    let sums = sums.values.as_mut_ptr().add(at(panel, row, half));
                    _mm512_storeu_ps(sums, *total);
                }
            }
        }
    }
}

/// How far ahead of codes tiles prefetch, in all panels together.
const AHEAD: usize = 8192;

#[cfg(test)]
mod tests {
    use super::super::exponents::with_added;
    use super::super::kernel::Mode;
    use super::super::pack_bf16;
    use super::super::tile_amx::{self, Tiles};
    use super::*;
    use fp8_core::{Format, Isa, IsaLevel};

    const STEPS: usize = 5;
    const LEN: usize = STEPS * DEPTH;

    /// The definition, from values: `a[row][index]`, `b[index][column]`.
    fn defined(a: &[f32], b: impl Fn(usize) -> f32, first: f32) -> f32 {
        let mut total = first;
        for step in 0..STEPS {
            let (mut even, mut odd) = (0f32, 0f32);
            for index in (step * DEPTH..(step + 1) * DEPTH).step_by(2) {
                even = a[index].mul_add(b(index), even);
                odd = a[index + 1].mul_add(b(index + 1), odd);
            }
            total += even + odd;
        }
        total
    }

    fn bits(x: f32) -> u16 {
        (x.to_bits() >> 16) as u16
    }

    /// Sums as they are defined, and as tiles compute them where there are tiles; with and without something added to exponents.
    #[test]
    fn few_rows_are_summed_as_tiles_sum_them() {
        let Some(isa) = Isa::available().last() else {
            return;
        };
        if isa.level() < IsaLevel::Avx512Bf16 {
            return;
        }
        let format = Format::E4M3;
        // All finite codes of both signs, in an order without a pattern that sums would see.
        let code = |i: usize| {
            let code = (i.wrapping_mul(2_654_435_761) >> 7) as u8;
            if code & 0x7F == 0x7F { 0x30 } else { code }
        };
        let a: Vec<f32> = (0..ROWS * LEN)
            .map(|i| format.decode(code(i + 12345)))
            .collect();
        let mut packed_a = vec![0u16; 16 * SLICE_STRIDE];
        for row in 0..ROWS {
            for index in 0..LEN {
                packed_a[row * SLICE_STRIDE + index] = bits(a[row * LEN + index]);
            }
        }
        let codes: [Vec<u8>; 2] =
            [0, 77_777].map(|first| (0..PANEL * LEN).map(|i| code(i + first)).collect());
        // SAFETY: the processor has the instructions of this level.
        let decoder = unsafe { Decoder::new(format) };
        let added: [Vec<u16>; 2] = [3, 8].map(|factor| {
            let below = |i: usize| ((i * factor) % 47) as i16;
            let all = 0..STEPS * PANEL;
            all.map(|i| (-(below(i) << 7)) as u16).collect()
        });
        for (rows, panels, scaled) in [
            (1, 1, false),
            (1, 2, false),
            (2, 1, false),
            (1, 1, true),
            (1, 2, true),
            (2, 1, true),
        ] {
            let mut values = vec![vec![0u16; PANEL * LEN]; 2];
            for ((codes, added), values) in codes.iter().zip(&added).zip(&mut values) {
                // SAFETY: as above.
                unsafe { pack_bf16::decode_panel(&decoder, codes, values) };
                for (i, value) in values.iter_mut().enumerate().filter(|_| scaled) {
                    let (segment, column) = (i / (DEPTH * PANEL), i / 2 % PANEL);
                    *value = with_added(*value, added[segment * PANEL + column]);
                }
            }
            let packed: Vec<_> = codes[..panels]
                .iter()
                .zip(&added)
                .map(|(codes, added)| PackedPanel {
                    codes,
                    added: if scaled { added } else { &[] },
                })
                .collect();
            for accumulate in [false, true] {
                let start: Vec<f32> = (0..16 * 2 * PANEL).map(|i| i as f32 / 7.).collect();
                let mut few = start.clone();
                let sums = Sums {
                    values: &mut few,
                    stride: 2 * PANEL,
                };
                // SAFETY: as above.
                unsafe { multiply(&decoder, rows, &packed_a, &packed, sums, accumulate) };
                let mut tiled = start.clone();
                if isa.level() == IsaLevel::Amx {
                    // SAFETY: the processor has tiles, and this thread has no others.
                    let tiles = unsafe { Tiles::new() };
                    for (panel, values) in values[..panels].iter().enumerate() {
                        let factors = tile_amx::Factors {
                            a: &packed_a,
                            rows: ROWS,
                            panels: 1,
                            panel: |_| &values[..],
                            streamed: false,
                        };
                        let mode = Mode {
                            accumulate,
                            skip: 0,
                            next_slice: packed_a.len(),
                            pairs: false,
                            out: None,
                        };
                        let sums = &mut Sums {
                            values: &mut tiled[panel * PANEL..],
                            stride: 2 * PANEL,
                        };
                        tiles.multiply(&factors, sums, mode);
                    }
                }
                for row in 0..rows {
                    for column in 0..panels * PANEL {
                        let at = row * 2 * PANEL + column;
                        let (panel, column) = (column / PANEL, column % PANEL);
                        let b = |index: usize| {
                            let value =
                                values[panel][index / 2 * 2 * PANEL + column * 2 + index % 2];
                            f32::from_bits(u32::from(value) << 16)
                        };
                        let first = if accumulate { start[at] } else { 0. };
                        let expected = defined(&a[row * LEN..], b, first);
                        assert_eq!(few[at].to_bits(), expected.to_bits(), "row {row}, {at}");
                        if isa.level() == IsaLevel::Amx {
                            assert_eq!(tiled[at].to_bits(), expected.to_bits(), "tile, row {row}");
                        }
                    }
                }
            }
        }
    }
}
