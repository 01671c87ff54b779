//! The codes of one weight, all of them or some rows.

use super::options::Codes;
use super::scales::Numbers;
use crate::load::survey::Layer;
use fp8_core::{Format, Granularity};
use std::ops::Range;
use std::sync::LazyLock;

/// The largest magnitudes of E4M3 (448) and of FNUZ (240), as codes of E4M3 without the sign.
const LARGEST: u8 = 0x7E;
const LARGEST_FNUZ: u8 = 0x77;
const NAN: u8 = 0x7F;

/// Bytes that samples read of a weight, and the number of rows over which they are spread.
const SAMPLE: usize = 1 << 15;
const ROWS: usize = 8;
/// Bytes of the largest weight that samples read as a whole.
const SMALL: usize = 1 << 16;
/// Bytes to read at a time.
const PIECE: usize = 1 << 22;

/// What the codes have in common.
#[derive(Default)]
pub(super) struct CodeStats {
    pub(super) count: usize,
    pub(super) zeros: usize,
    pub(super) negative_zeros: usize,
    pub(super) saturated: usize,
    pub(super) nans: usize,
    /// Index of the first NaN in the weight.
    pub(super) first_nan: Option<usize>,
    /// Sum of the squares of code * scale.
    squares: f64,
    pub(super) bytes_read: u64,
    /// The number of scales whose codes were all read and are not all 0, and the largest of these codes.
    used_scales: usize,
    largest: u8,
    /// Scales that are 0 and have a code other than 0.
    pub(super) used_zero: Option<usize>,
}

/// The squares of all codes; 0 for NaN.
static SQUARES: LazyLock<[f64; 256]> = LazyLock::new(|| {
    std::array::from_fn(|code| {
        let value = f64::from(Format::E4M3.decode(code as u8));
        if value.is_nan() { 0. } else { value * value }
    })
});

impl CodeStats {
    /// Reads the codes of `layer`; None if no codes should or can be read.
    pub(super) fn read(layer: &Layer<'_>, scales: Option<&Numbers>, codes: Codes) -> Option<Self> {
        let [n, k] = layer.shape;
        let len = n.checked_mul(k).filter(|len| *len > 0)?;
        if codes == Codes::None {
            return None;
        }
        let mut stats = Self::default();
        let grid = layer.grid();
        let mut largest = vec![0; grid.len()];
        let indexed =
            scales.filter(|scales| !layer.is_tiled && stored_width(layer, scales).is_some());
        let whole = codes == Codes::All || len <= SMALL;
        match whole {
            true => {
                for begin in (0..len).step_by(PIECE) {
                    stats.add(layer, indexed, begin..len.min(begin + PIECE), &mut largest)?;
                }
                stats.note_scales(&largest);
            }
            false => {
                let rows = (SAMPLE / k).clamp(1, ROWS).min(n);
                let width = k.min(SAMPLE);
                let rows_are_whole = width == k;
                let keeps = match layer.granularity {
                    Granularity::Rowwise | Granularity::Mx => rows_are_whole,
                    Granularity::Blockwise { rows: 1, .. } => rows_are_whole,
                    _ => false,
                };
                for at in 0..rows {
                    // The middle of each of so many parts of the rows.
                    let row = (2 * at + 1) * n / (2 * rows);
                    stats.add(layer, indexed, row * k..row * k + width, &mut largest)?;
                    if keeps {
                        stats.note_scales(&largest[grid.index(row, 0)..=grid.index(row, k - 1)]);
                    }
                }
            }
        }
        Some(stats)
    }

    /// Notes scales whose codes were all read, by the largest code of each.
    fn note_scales(&mut self, largest: &[u8]) {
        self.used_scales += largest.iter().filter(|code| **code > 0).count();
        self.largest = largest.iter().copied().max().unwrap_or(0).max(self.largest);
    }

    /// Counts the codes of a range, and notes the largest of each scale in `largest_of`.
    fn add(
        &mut self,
        layer: &Layer<'_>,
        scales: Option<&Numbers>,
        range: Range<usize>,
        largest_of: &mut [u8],
    ) -> Option<()> {
        let mut at = range.start;
        let bytes = layer.codes.bytes(range).ok()?;
        self.bytes_read += bytes.len() as u64;
        let (grid, k) = (layer.grid(), layer.shape[1]);
        let width = scales.and_then(|scales| stored_width(layer, scales));
        let block = grid.block_cols().clamp(1, k);
        let mut counts = [0usize; 256];
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (row, col) = (at / k, at % k);
            // The codes up to the next block or row have one scale.
            let count = (block - col % block).min(k - col).min(rest.len());
            let (same, others) = rest.split_at(count);
            let (mut largest, mut squares, mut nan) = (0, 0f64, None);
            for (offset, code) in same.iter().enumerate() {
                counts[usize::from(*code)] += 1;
                squares += SQUARES[usize::from(*code)];
                match code & NAN {
                    NAN => nan = nan.or(Some(at + offset)),
                    magnitude => largest = magnitude.max(largest),
                }
            }
            self.first_nan = self.first_nan.or(nan);
            let index = grid.index(row, col);
            let stored = width.map(|width| {
                let cols = grid.scale_cols();
                index / cols * width + index % cols
            });
            let scale = match (scales, stored) {
                (Some(scales), Some(stored)) => scales.value(stored).or(scales.median),
                (Some(scales), None) => scales.median,
                (None, _) => None,
            };
            let scale = scale.unwrap_or(1.);
            if scale.is_finite() {
                self.squares += squares * f64::from(scale) * f64::from(scale);
            }
            if scale == 0. && largest > 0 {
                self.used_zero = self.used_zero.or(stored);
            }
            largest_of[index] = largest.max(largest_of[index]);
            (rest, at) = (others, at + count);
        }
        for (code, count) in counts.iter().enumerate() {
            self.count += count;
            match code as u8 {
                0 => self.zeros += count,
                0x80 => {
                    self.zeros += count;
                    self.negative_zeros += count;
                }
                code if code & 0x7F == LARGEST => self.saturated += count,
                code if code & 0x7F == NAN => self.nans += count,
                _ => {}
            }
        }
        Some(())
    }

    /// Root of the mean square of the weights that were read; None if all are 0.
    pub(super) fn rms(&self) -> Option<f64> {
        let count = self.count - self.nans;
        (self.squares > 0. && count > 0).then(|| (self.squares / count as f64).sqrt())
    }

    /// Whether codes reach only the largest magnitude of FNUZ, although the largest weight of every scale should have the largest code.
    pub(super) fn is_short(&self, powers_of_two: bool) -> Option<bool> {
        // The largest code of a scale that is a power of two may be any in the upper half.
        let enough = if powers_of_two { 64 } else { 1 };
        (self.used_scales >= enough).then_some(self.largest <= LARGEST_FNUZ)
    }

    /// The share of codes of the largest magnitude.
    pub(super) fn saturated_share(&self) -> f64 {
        self.saturated as f64 / self.count.max(1) as f64
    }

    /// The share of saturated codes that quantization leaves: one for each scale, and ties.
    pub(super) fn usual_saturation(&self, layer: &Layer<'_>) -> f64 {
        const TIES: f64 = 8.;
        const CLIPPED: f64 = 0.02;
        let grid = layer.grid();
        let [n, k] = layer.shape;
        CLIPPED + TIES * grid.len() as f64 / (n as f64 * k as f64).max(1.)
    }
}

/// Scales in a row of the stored tensor; None if it has other elements than the grid or a padded grid.
fn stored_width(layer: &Layer<'_>, scales: &Numbers) -> Option<usize> {
    let grid = layer.grid();
    let dims = layer.scale.map(|scale| scale.shape()).unwrap_or_default();
    match dims {
        _ if scales.count == grid.len() => Some(grid.scale_cols()),
        &[_, width] if width >= grid.scale_cols() => Some(width),
        _ if scales.count < grid.len() => Some(grid.scale_cols()),
        _ => None,
    }
}
