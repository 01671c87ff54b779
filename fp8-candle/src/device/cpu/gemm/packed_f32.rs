//! Products of packed codes with few rows in f32: each code is read once from memory, decoded in registers, and multiplied.
//!
//! A pair of sum indices lies in one 16-bit lane, so shifts move both codes to where a wider format has its exponent and
//! mantissa ([`Route`]). The exponent's bias is not corrected: all values, and the sums of a tile, are too small by the same
//! power of two until they are stored. This is exact: products are multiples of 2^-146, which subnormal numbers of f32 hold, and
//! sums long enough to be rounded are normal numbers.

use super::layout::SLICE;
use super::prefetch;
use fp8_core::Format;

/// How codes become values in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// As f16, which the processor converts. An E4M3 code gives 2^-8 of its value, an E5M2 code its value.
    #[cfg_attr(
        target_arch = "aarch64",
        allow(dead_code, reason = "only x86-64 takes this route")
    )]
    Half,
    /// As the upper half of an f32, which is less work. Subnormal codes become subnormal numbers, which processors of Intel
    /// multiply in microcode.
    Shift,
}

/// What values are relative to those of the codes: `value = code * FACTOR`.
pub(super) const fn factor(format: Format, route: Route) -> f32 {
    let exponent = match (route, format) {
        (Route::Half, Format::E4M3) => -8,
        (Route::Shift, Format::E4M3) => -120,
        (Route::Shift, Format::E5M2) => -112,
        _ => 0,
    };
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Twice the smallest magnitude that not all routes decode, as a byte: that of NaN, and of the infinity of E5M2. None if they
/// decode nothing of this format.
const fn special(format: Format) -> Option<u8> {
    match format {
        Format::E4M3 => Some(2 * 0x7F),
        Format::E5M2 => Some(2 * 0x7C),
        Format::E4M3Fnuz | Format::E5M2Fnuz => None,
    }
}

/// Whether tiles can decode all of these codes. Others are not packed.
pub(super) fn reads(format: Format, codes: &[u8]) -> bool {
    special(format).is_some_and(|bound| {
        // Without an end before the last code, so that the loop is compiled to vectors.
        let greatest = codes.iter().fold(0, |most: u8, code| most.max(code << 1));
        greatest < bound
    })
}

/// The rows of A of a tile, from some index of the sum on. The sum may end in a later slice.
#[derive(Clone, Copy)]
pub(super) struct TileRows<'a> {
    /// One tile of a slice, packed as A, and all that follows it.
    pub(super) values: &'a [f32],
    /// The first index of the sum within that slice.
    pub(super) skip: usize,
    /// Elements from one slice to the next.
    pub(super) next_slice: usize,
}

/// What `R` rows of A hold for a pair of sum indices.
pub(super) type PairOfRows<const R: usize> = [[f32; R]; 2];

impl<'a> TileRows<'a> {
    /// The next pairs of sum indices, `pairs` in all, slice by slice.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline(always)]
    pub(super) fn slices<const R: usize>(
        self,
        pairs: usize,
    ) -> impl Iterator<Item = &'a [PairOfRows<R>]> {
        let end = self.skip + 2 * pairs;
        (0..end.div_ceil(SLICE)).map(
            #[inline(always)]
            move |slice| {
                let first = if slice == 0 { self.skip } else { 0 };
                let last = SLICE.min(end - slice * SLICE);
                let values = &self.values[slice * self.next_slice..];
                let (rows, _) = values[first * R..last * R].as_chunks::<R>();
                rows.as_chunks::<2>().0
            },
        )
    }
}

/// Defines `tile::<R, P, E5M2, SHIFT>`: the sums of `R` rows by `P` neighbouring panels of two vectors of columns, or adds to
/// them, of codes that it [`reads`].
///
/// Panels begin at the first index of `a` and have the length of the sum, which may go over several slices.
#[cfg(target_arch = "x86_64")]
macro_rules! packed_tile {
    (
        $features:literal, $panel:expr, $codes:ident;
        $zero:ident, $load:ident, $store:ident, $multiply:ident, $multiply_add:ident, $set:ident, $splat:expr;
        $load_codes:ident
    ) => {
        #[target_feature(enable = $features)]
        fn tile<const R: usize, const P: usize, const E5M2: bool, const SHIFT: bool>(
            a: TileRows<'_>,
            codes: [&[u8]; P],
            sums: &mut Sums<'_>,
            accumulate: bool,
        ) {
            const LANES: usize = $panel / 2;
            let format = if E5M2 { Format::E5M2 } else { Format::E4M3 };
            let route = if SHIFT { Route::Shift } else { Route::Half };
            // By index, not `map`, which would be compiled once more for each tile.
            let mut chunks = [codes[0].as_chunks::<{ 2 * $panel }>().0; P];
            for panel in 1..P {
                chunks[panel] = codes[panel].as_chunks().0;
            }
            let codes = chunks;
            let pairs = codes[0].len();
            assert!(codes.iter().all(|codes| codes.len() == pairs));
            assert!(sums.values.len() >= (R - 1) * sums.stride + P * $panel);
            let (stride, sums) = (sums.stride, sums.values.as_mut_ptr());
            let mut tile = [[[$zero(); 2]; P]; R];
            if accumulate {
                let factor = $set(factor(format, route));
                for (row, tile) in tile.iter_mut().enumerate() {
                    for (panel, tile) in tile.iter_mut().enumerate() {
                        let at = row * stride + panel * $panel;
                        // SAFETY: R rows of P panels were checked above.
                        let kept = unsafe { [$load(sums.add(at)), $load(sums.add(at + LANES))] };
                        let [left, right] = split::<SHIFT>(kept);
                        *tile = [$multiply(left, factor), $multiply(right, factor)];
                    }
                }
            }
            let ahead = ahead(R, pairs, $panel);
            let mut pair = 0;
            for slice in a.slices::<R>(pairs) {
                for a in slice {
                    for (panel, codes) in codes.iter().enumerate() {
                        // SAFETY: slices have `pairs` pairs in all, as many as each panel.
                        let codes = unsafe { codes.get_unchecked(pair) };
                        prefetch(codes, ahead);
                        // SAFETY: a pair of sum indices of a panel is one vector of codes.
                        let codes: $codes = unsafe { $load_codes(codes.as_ptr().cast()) };
                        let values = values::<E5M2, SHIFT>(codes);
                        // By index, as in `tile_f32.rs`.
                        for (index, values) in values.iter().enumerate() {
                            for (row, tile) in tile.iter_mut().enumerate() {
                                let a = $splat(&a[index][row]);
                                let [left, right] = &mut tile[panel];
                                *left = $multiply_add(a, values[0], *left);
                                *right = $multiply_add(a, values[1], *right);
                            }
                        }
                    }
                    pair += 1;
                }
            }
            let factor = $set(1. / factor(format, route));
            for (row, tile) in tile.iter().enumerate() {
                for (panel, &[left, right]) in tile.iter().enumerate() {
                    let sums_of_codes = [$multiply(left, factor), $multiply(right, factor)];
                    let [left, right] = join::<SHIFT>(sums_of_codes);
                    let at = row * stride + panel * $panel;
                    // SAFETY: as for the load.
                    unsafe {
                        $store(sums.add(at), left);
                        $store(sums.add(at + LANES), right);
                    }
                }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use packed_tile;

/// How many bytes ahead a tile of `rows` rows prefetches, with panels of `width` columns.
pub(super) const fn ahead(rows: usize, pairs: usize, width: usize) -> usize {
    match rows {
        // As fast as codes come from memory.
        ..=4 => 1024,
        // Taller tiles leave time for the whole next slice.
        _ if 2 * pairs < SLICE => 2 * pairs * width,
        _ => SLICE * width,
    }
}

/// Prefetches the codes that lie `ahead` bytes after these. A panel comes from memory in one stream.
#[inline(always)]
pub(super) fn prefetch(codes: &[u8], ahead: usize) {
    prefetch::near(codes.as_ptr().wrapping_add(ahead));
}

/// Calls `tile_of` for the first pattern that has these numbers of rows and panels.
macro_rules! packed_tiles {
    ($rows:expr, $codes:expr, $arguments:tt, $($count:literal: $panels:literal,)+) => {
        match ($rows, $codes) {
            $(($count, codes) if let Ok(codes) = <[&[u8]; $panels]>::try_from(codes) => {
                packed_tiles!(@ $count, $panels, codes, $arguments)
            })+
            (rows, codes) => unreachable!("a tile of {rows} rows by {} panels", codes.len()),
        }
    };
    (@ $count:literal, $panels:literal, $codes:ident, ($how:expr, $a:expr, $sums:expr, $accumulate:expr)) => {
        tile_of::<$count, $panels>($how, $a, $codes, $sums, $accumulate)
    };
}
pub(super) use packed_tiles;

/// How many panels are summed at a time for tiles of `rows` rows. Few sums would not hide the latency of additions; panels
/// read in turn are more streams from memory.
pub(super) const fn panels_at_once(rows: usize) -> usize {
    match rows {
        1 => 4,
        2 => 2,
        _ => 1,
    }
}
