//! Casts of rows in groups of neighbours under powers of two.

use crate::kernels::{self, Isa};
use crate::{Contraction, Granularity, HighPrecision};

/// E4M3 codes of `src`, rows of `cols` elements, rounded to nearest even, in groups of `group` neighbours in a row; the last one of a row
/// may have fewer. Each group has its own scale: the largest power of two under which its largest magnitude is at most 448, but no more
/// than 2^48. The dequant_scale of each group, in row-major order, is the reciprocal of that.
///
/// A power of two rounds nothing, so codes have as much precision as under any other scale, and both casts take less time. A group with
/// infinity has the quant_scale 0 and a dequant_scale of infinity, one with NaN a scale of NaN: it decodes to NaN.
///
/// ```
/// use fp8_core::encode_groups;
/// let (mut codes, mut dequant_scales) = ([0; 4], [0.; 2]);
/// encode_groups(&[1f32, 3.5, 500., 0.], 4, 2, &mut codes, &mut dequant_scales);
/// assert_eq!(dequant_scales, [1. / 128., 2.]);
/// assert_eq!(codes, [0x70, 0x7E, 0x78, 0]); // 128, 448, 256 for 250, 0
/// ```
///
/// # Panics
/// If `src` is not a whole number of rows, `group` is 0, or lengths do not fit: a code for each element, a scale for each group.
pub fn encode_groups<T: HighPrecision>(
    src: &[T],
    cols: usize,
    group: usize,
    codes: &mut [u8],
    dequant_scales: &mut [f32],
) {
    assert!(group > 0, "a group of no elements");
    let rows = src.len() / cols.max(1);
    let granularity = Granularity::Blockwise {
        rows: 1,
        cols: group,
    };
    let grid = granularity.grid(rows, cols, Contraction::Cols);
    assert_eq!(rows * cols, src.len(), "elements of rows of {cols}");
    assert_eq!(src.len(), codes.len(), "codes");
    assert_eq!(grid.len(), dequant_scales.len(), "dequant_scales");
    kernels::groups::encode(Isa::best(), src, &grid, codes, dequant_scales);
}
