//! Casts over runs of whole rows of a matrix, under the scales of a [`ScaleGrid`].
//!
//! Every function takes rows from `first_row` of the grid's matrix, so a matrix may be split over threads in any way.

use std::ops::Range;

use crate::{
    Cast, Format, HighPrecision, ScaleGrid,
    kernels::{
        self, Isa, Layout,
        amax::Amax,
        decode::Decoder,
        divided, general,
        nearest::Nearest,
        transpose::{PANEL, transpose},
    },
};

/// A stretch of contiguous elements and of the scales that belong to them.
struct Piece {
    elements: Range<usize>,
    scales: Range<usize>,
    layout: Layout,
}

/// Merges max |x| of each scale's elements into `out`, which has [`ScaleGrid::len`] entries and starts at 0.
///
/// NaN wins over everything, then infinity. Entries of blocks that `src` does not touch stay as they are, so the rows
/// of a matrix may come in any order and any split.
///
/// # Panics
/// If `src` is not a whole number of rows, its rows go beyond those of the grid, or `out` has another length.
pub fn amax_rows<T: HighPrecision>(src: &[T], first_row: usize, grid: &ScaleGrid, out: &mut [f32]) {
    let run = row_run(src.len(), first_row, grid, out.len());
    let isa = Isa::best();
    for_each_piece(grid, run, |piece| {
        let (src, out) = (&src[piece.elements], &mut out[piece.scales]);
        kernels::amax::merge(isa, src, piece.layout, out);
    });
}

/// The codes of `x * quant_scale` for each `x` of `src`, with the scale of its block. If the cast [divides](Cast::divides),
/// `quant_scales` are dequant_scales, and the codes those of `x / dequant_scale`.
///
/// Stochastic rounding numbers the elements of the whole matrix in row-major order.
///
/// ```
/// use fp8_core::{Cast, Format, ScaleGrid, encode_rows};
///
/// let grid = ScaleGrid::per_row(2, 2);
/// let mut codes = [0; 4];
/// encode_rows(&Cast::new(Format::E4M3), &[1f32, 2.0, 1.0, 2.0], 0, &grid, &[1.0, 2.0], &mut codes);
/// assert_eq!(codes, [0x38, 0x40, 0x40, 0x48]); // 1, 2, and twice that
///
/// // A tie between 112 and 120, which the reciprocal of the scale misses.
/// let (cast, src, scale) = (Cast::new(Format::E4M3), [-0.79296875f32], 0.0068359375f32);
/// let (grid, mut codes) = (ScaleGrid::tensorwise(1, 1), [0; 1]);
/// encode_rows(&cast.with_division(true), &src, 0, &grid, &[scale], &mut codes);
/// assert_eq!(Format::E4M3.decode(codes[0]), -112.0);
/// encode_rows(&cast, &src, 0, &grid, &[1.0 / scale], &mut codes);
/// assert_eq!(Format::E4M3.decode(codes[0]), -120.0);
/// ```
///
/// # Panics
/// If `src` is not a whole number of rows, its rows go beyond those of the grid, `quant_scales` does not have
/// [`ScaleGrid::len`] entries, or `dst` does not have the length of `src`.
pub fn encode_rows<T: HighPrecision>(
    cast: &Cast,
    src: &[T],
    first_row: usize,
    grid: &ScaleGrid,
    quant_scales: &[f32],
    dst: &mut [u8],
) {
    encode_run::<T, false>(cast, src, first_row, grid, quant_scales, dst);
}

/// [`encode_rows`], and max |x| over `src` (without the scales) from the same pass.
///
/// # Panics
/// As [`encode_rows`].
pub fn encode_rows_with_amax<T: HighPrecision>(
    cast: &Cast,
    src: &[T],
    first_row: usize,
    grid: &ScaleGrid,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> f32 {
    encode_run::<T, true>(cast, src, first_row, grid, quant_scales, dst)
}

/// [`encode_rows_with_amax`], with the codes of the transposed matrix from the same pass.
///
/// `transposed` has [`ScaleGrid::cols`] rows of [`ScaleGrid::rows`] codes, for the whole matrix; only the columns that
/// belong to the rows of `src` are written. The codes equal those of `dst`, with stochastic rounding too.
///
/// # Panics
/// As [`encode_rows`], and if `transposed` does not have one code for each element of the grid.
pub fn encode_rows_transposed<T: HighPrecision>(
    cast: &Cast,
    src: &[T],
    first_row: usize,
    grid: &ScaleGrid,
    quant_scales: &[f32],
    dst: &mut [u8],
    transposed: &mut [u8],
) -> f32 {
    check_len(src.len(), dst.len());
    assert_eq!(
        transposed.len(),
        grid.rows() * grid.cols(),
        "the transposed codes do not fit the grid"
    );
    row_run(src.len(), first_row, grid, quant_scales.len());
    let mut amax = Amax::default();
    let panel = (grid.cols() * PANEL).max(1);
    for (index, (src, dst)) in src.chunks(panel).zip(dst.chunks_mut(panel)).enumerate() {
        let row = first_row + index * PANEL;
        let max = encode_run::<T, true>(cast, src, row, grid, quant_scales, dst);
        amax.merge(max.to_bits());
        transpose(dst, grid.cols(), transposed, grid.rows(), row);
    }
    amax.value()
}

fn encode_run<T: HighPrecision, const AMAX: bool>(
    cast: &Cast,
    src: &[T],
    first_row: usize,
    grid: &ScaleGrid,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> f32 {
    check_len(src.len(), dst.len());
    let run = row_run(src.len(), first_row, grid, quant_scales.len());
    let isa = Isa::best();
    let nearest = Nearest::new(cast);
    let first_element = first_row as u64 * grid.cols() as u64;
    let mut amax = Amax::default();
    for_each_piece(grid, run, |piece| {
        let element = first_element + piece.elements.start as u64;
        let (src, dst) = (&src[piece.elements.clone()], &mut dst[piece.elements]);
        let scales = &quant_scales[piece.scales];
        let layout = piece.layout;
        amax.merge(match nearest {
            _ if cast.divides => {
                let cast = (cast, nearest);
                divided::encode::<T, AMAX>(isa, cast, src, layout, scales, element, dst)
            }
            Some(nearest) => {
                kernels::nearest::encode::<T, AMAX>(isa, nearest, src, layout, scales, dst)
            }
            None => general::encode::<T, AMAX>(isa, cast, src, layout, scales, element, dst),
        });
    });
    amax.value()
}

/// `value * dequant_scale` for each code, in f32, then rounded to `T`, with the scale of the code's block.
///
/// # Panics
/// If `codes` is not a whole number of rows, its rows go beyond those of the grid, `dequant_scales` does not have
/// [`ScaleGrid::len`] entries, or `dst` does not have the length of `codes`.
pub fn decode_rows<T: HighPrecision>(
    format: Format,
    codes: &[u8],
    first_row: usize,
    grid: &ScaleGrid,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    check_len(codes.len(), dst.len());
    let run = row_run(codes.len(), first_row, grid, dequant_scales.len());
    let isa = Isa::best();
    let decoder = Decoder::new(format);
    for_each_piece(grid, run, |piece| {
        let (codes, dst) = (&codes[piece.elements.clone()], &mut dst[piece.elements]);
        let scales = &dequant_scales[piece.scales];
        kernels::decode::decode(isa, decoder, codes, piece.layout, scales, dst);
    });
}

fn check_len(src: usize, dst: usize) {
    assert_eq!(
        src, dst,
        "source and destination of a cast differ in length"
    );
}

/// The rows that `len` elements, starting at `first_row`, make up.
fn row_run(len: usize, first_row: usize, grid: &ScaleGrid, scales: usize) -> Range<usize> {
    assert_eq!(scales, grid.len(), "number of scales does not fit the grid");
    let rows = match grid.cols() {
        0 => {
            assert_eq!(len, 0, "elements given for a matrix without columns");
            0
        }
        cols => {
            assert_eq!(
                len % cols,
                0,
                "{len} elements are no whole number of rows of {cols}"
            );
            len / cols
        }
    };
    assert!(
        first_row <= grid.rows() && rows <= grid.rows() - first_row,
        "{rows} rows from row {first_row} do not fit a matrix of {} rows",
        grid.rows()
    );
    first_row..first_row + rows
}

/// Splits a run of rows into as few pieces as its scales allow; elements count from the start of the run.
fn for_each_piece(grid: &ScaleGrid, run: Range<usize>, mut work: impl FnMut(Piece)) {
    let (cols, scale_cols) = (grid.cols(), grid.scale_cols());
    if run.is_empty() || cols == 0 {
        return;
    }
    let elements =
        |rows: Range<usize>| (rows.start - run.start) * cols..(rows.end - run.start) * cols;
    // Scales of a single row whose blocks are all of one length: rows follow each other as blocks do.
    let block_cols = grid.block_cols().min(cols);
    if grid.block_rows() == 1
        && cols.is_multiple_of(block_cols)
        && (scale_cols == 1 || block_cols > 1)
    {
        work(Piece {
            elements: elements(run.clone()),
            scales: run.start * scale_cols..run.end * scale_cols,
            layout: Layout::Segments(block_cols),
        });
        return;
    }
    let mut row = run.start;
    while row < run.end {
        let scale_row = row / grid.block_rows();
        let scales = scale_row * scale_cols..(scale_row + 1) * scale_cols;
        // A scale that spans the row spans all rows of its block.
        let end = if scale_cols == 1 {
            run.end.min((scale_row + 1) * grid.block_rows())
        } else {
            row + 1
        };
        let layout = match grid.block_cols() {
            1 if scale_cols > 1 => Layout::PerElement,
            block_cols if scale_cols > 1 => Layout::Segments(block_cols),
            _ => Layout::Segments((end - row) * cols),
        };
        work(Piece {
            elements: elements(row..end),
            scales,
            layout,
        });
        row = end;
    }
}
