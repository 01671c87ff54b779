//! Grids and the functions over rows.

use crate::common::word;
use fp8_core::{
    Cast, Contraction, Format, Granularity, GridError, Overflow, Rounding, ScaleGrid,
    StochasticKey, amax, amax_rows, decode, decode_rows, encode, encode_rows,
    encode_rows_transposed, encode_rows_with_amax, encode_with_amax,
};
use half::bf16;
use proptest::prelude::*;

fn grids() -> impl Strategy<Value = ScaleGrid> {
    let size = || prop_oneof![1..4usize, 30..70usize];
    let block = || prop_oneof![Just(1), 2..5usize, Just(32usize), Just(100)];
    let blocks = (size(), size(), block(), block())
        .prop_map(|(r, c, br, bc)| ScaleGrid::new(r, c, br, bc).unwrap());
    let whole = (size(), size(), 0..3).prop_map(|(rows, cols, kind)| match kind {
        0 => ScaleGrid::tensorwise(rows, cols),
        1 => ScaleGrid::per_row(rows, cols),
        _ => ScaleGrid::per_col(rows, cols),
    });
    prop_oneof![blocks, whole]
}

fn matrix(grid: &ScaleGrid, seed: u32) -> Vec<f32> {
    (0..grid.rows() * grid.cols())
        .map(|i| (word(seed, i as u32) as f32 / 2e9 - 1.0).powi(5) * 30.0)
        .collect()
}

fn scales(grid: &ScaleGrid, seed: u32) -> Vec<f32> {
    (0..grid.len())
        .map(|i| 0.5 + word(seed, i as u32) as f32 / 1e8)
        .collect()
}

fn casts() -> [Cast; 3] {
    let key = StochasticKey {
        seed: 5,
        step: 6,
        tensor: 7,
    };
    let cast = Cast::new(Format::E4M3);
    [
        cast,
        cast.with_rounding(Rounding::Stochastic(key)),
        Cast::new(Format::E5M2).with_overflow(Overflow::NonFinite),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_grid_covers_each_element_once(grid in grids()) {
        prop_assert_eq!(grid.len(), grid.scale_rows() * grid.scale_cols());
        let mut counts = vec![0; grid.len()];
        for row in 0..grid.rows() {
            for col in 0..grid.cols() {
                counts[grid.index(row, col)] += 1;
                let transposed = grid.transpose();
                let (block_row, block_col) = (row / grid.block_rows(), col / grid.block_cols());
                prop_assert_eq!(transposed.index(col, row), block_col * grid.scale_rows() + block_row);
            }
        }
        prop_assert!(counts.iter().all(|&count| 0 < count && count <= grid.block_rows() * grid.block_cols()));
        prop_assert_eq!(counts.iter().sum::<usize>(), grid.rows() * grid.cols());
        prop_assert_eq!(grid.transpose().transpose(), grid);
    }

    /// Every function equals the definition, element by element.
    #[test]
    fn rows_equal_the_definition(grid in grids(), seed: u32) {
        let (src, scales) = (matrix(&grid, seed), scales(&grid, seed ^ 1));
        let index = |i: usize| grid.index(i / grid.cols(), i % grid.cols());
        for cast in casts() {
            let expected: Vec<u8> = src.iter().enumerate().map(|(i, x)| cast.encode(x * scales[index(i)], i as u64)).collect();
            let mut codes = vec![0x55; src.len()];
            encode_rows(&cast, &src, 0, &grid, &scales, &mut codes);
            prop_assert_eq!(&codes, &expected);
            codes.fill(0x55);
            let max = encode_rows_with_amax(&cast, &src, 0, &grid, &scales, &mut codes);
            prop_assert_eq!(&codes, &expected);
            prop_assert_eq!(max, amax(&src));

            let mut values = vec![bf16::NAN; src.len()];
            decode_rows(cast.format, &codes, 0, &grid, &scales, &mut values);
            for (i, (&code, value)) in codes.iter().zip(values).enumerate() {
                prop_assert_eq!(value, bf16::from_f32(cast.format.decode(code) * scales[index(i)]));
            }
        }
        let mut expected = vec![0f32; grid.len()];
        for (i, x) in src.iter().enumerate() {
            expected[index(i)] = expected[index(i)].max(x.abs());
        }
        let mut out = vec![0.0; grid.len()];
        amax_rows(&src, 0, &grid, &mut out);
        prop_assert_eq!(out, expected);
    }

    /// Casts that divide by their scales, in two runs of rows and as one row.
    #[test]
    fn casts_that_divide_equal_the_definition(grid in grids(), seed: u32, cut in 0..70usize) {
        let (src, scales) = (matrix(&grid, seed), scales(&grid, seed ^ 1));
        let (rows, cols) = (grid.rows(), grid.cols());
        let index = |i: usize| grid.index(i / cols, i % cols);
        let cut = cut.min(rows);
        for cast in casts().map(|cast| cast.with_division(true)) {
            let expected: Vec<u8> = src.iter().enumerate().map(|(i, x)| cast.encode_divided(*x, scales[index(i)], i as u64)).collect();
            let (mut codes, mut transposed) = (vec![0x55; src.len()], vec![0x55; src.len()]);
            encode_rows(&cast, &src, 0, &grid, &scales, &mut codes);
            prop_assert_eq!(&codes, &expected);
            codes.fill(0x55);
            for run in [cut..rows, 0..cut] {
                let range = run.start * cols..run.end * cols;
                let src = &src[range.clone()];
                let max = encode_rows_transposed(&cast, src, run.start, &grid, &scales, &mut codes[range], &mut transposed);
                prop_assert_eq!(max, amax(src));
            }
            prop_assert_eq!(&codes, &expected);
            prop_assert!((0..rows * cols).all(|i| transposed[i % cols * rows + i / cols] == expected[i]));

            let expected: Vec<u8> = src.iter().enumerate().map(|(i, x)| cast.encode_divided(*x, scales[0], i as u64)).collect();
            codes.fill(0x55);
            encode(&cast, &src, scales[0], &mut codes);
            prop_assert_eq!(&codes, &expected);
            codes.fill(0x55);
            prop_assert_eq!(encode_with_amax(&cast, &src, scales[0], &mut codes), amax(&src));
            prop_assert_eq!(&codes, &expected);
        }
    }

    /// A matrix cut into runs of rows, in any order, gives the same bits.
    #[test]
    fn splitting_a_matrix_changes_no_bit(grid in grids(), seed: u32, cuts in prop::collection::vec(0..70usize, 0..4)) {
        let (src, scales) = (matrix(&grid, seed), scales(&grid, seed ^ 1));
        let mut bounds: Vec<usize> = cuts.into_iter().map(|cut| cut.min(grid.rows())).chain([0, grid.rows()]).collect();
        bounds.sort();
        let mut whole_amax = vec![0.0; grid.len()];
        amax_rows(&src, 0, &grid, &mut whole_amax);
        let mut parts_amax = vec![0.0; grid.len()];
        for cast in casts() {
            let (mut whole, mut parts) = (vec![0; src.len()], vec![0; src.len()]);
            let mut decoded = (vec![0f32; src.len()], vec![0f32; src.len()]);
            let (mut again, mut transposed) = (vec![0; src.len()], vec![0; src.len()]);
            encode_rows(&cast, &src, 0, &grid, &scales, &mut whole);
            decode_rows(cast.format, &whole, 0, &grid, &scales, &mut decoded.0);
            for rows in bounds.windows(2).rev() {
                let range = rows[0] * grid.cols()..rows[1] * grid.cols();
                amax_rows(&src[range.clone()], rows[0], &grid, &mut parts_amax);
                encode_rows(&cast, &src[range.clone()], rows[0], &grid, &scales, &mut parts[range.clone()]);
                let max = encode_rows_transposed(&cast, &src[range.clone()], rows[0], &grid, &scales, &mut again[range.clone()], &mut transposed);
                prop_assert_eq!(max, amax(&src[range.clone()]));
                decode_rows(cast.format, &parts[range.clone()], rows[0], &grid, &scales, &mut decoded.1[range]);
            }
            let (rows, cols) = (grid.rows(), grid.cols());
            prop_assert!((0..rows * cols).all(|i| transposed[i % cols * rows + i / cols] == whole[i]));
            prop_assert_eq!(&whole, &again);
            prop_assert_eq!(whole, parts);
            prop_assert_eq!(decoded.0, decoded.1);
        }
        prop_assert_eq!(whole_amax, parts_amax);
    }

    #[test]
    fn slices_are_one_row(seed: u32, len in 0..200usize, quant_scale in 0.1f32..10.0) {
        let src: Vec<f32> = (0..len).map(|i| word(seed, i as u32) as f32 / 1e9 - 2.0).collect();
        for cast in casts() {
            let expected: Vec<u8> = src.iter().enumerate().map(|(i, x)| cast.encode(x * quant_scale, i as u64)).collect();
            let mut codes = vec![0x55; len];
            encode(&cast, &src, quant_scale, &mut codes);
            prop_assert_eq!(&codes, &expected);
            codes.fill(0x55);
            let max = encode_with_amax(&cast, &src, quant_scale, &mut codes);
            prop_assert_eq!(&codes, &expected);
            prop_assert_eq!(max, src.iter().fold(0.0, |max: f32, x| max.max(x.abs())));
            let mut values = vec![0f32; len];
            decode(cast.format, &codes, 3.0, &mut values);
            let decoded: Vec<f32> = codes.iter().map(|&code| cast.format.decode(code) * 3.0).collect();
            prop_assert_eq!(values, decoded);
        }
    }
}

#[test]
fn granularities_follow_the_contraction() {
    let blocks = Granularity::Blockwise { rows: 1, cols: 128 };
    let shape = |granularity: Granularity, contraction| {
        let grid = granularity.grid(100, 200, contraction);
        (grid.scale_rows(), grid.scale_cols())
    };
    for (granularity, cols, rows) in [
        (Granularity::Tensorwise, (1, 1), (1, 1)),
        (Granularity::Rowwise, (100, 1), (1, 200)),
        (blocks, (100, 2), (1, 200)),
        (Granularity::Mx, (100, 7), (4, 200)),
    ] {
        assert_eq!(shape(granularity, Contraction::Cols), cols, "{granularity}");
        assert_eq!(shape(granularity, Contraction::Rows), rows, "{granularity}");
    }
}

#[test]
fn empty_matrices_have_the_scales_of_their_whole_dimensions() {
    assert_eq!(ScaleGrid::tensorwise(0, 5).len(), 1);
    assert_eq!(ScaleGrid::per_row(0, 5).len(), 0);
    assert_eq!(ScaleGrid::per_col(0, 5).len(), 5);
    assert_eq!(ScaleGrid::per_row(5, 0).len(), 5);
    for grid in [
        ScaleGrid::tensorwise(0, 5),
        ScaleGrid::per_col(0, 5),
        ScaleGrid::per_row(5, 0),
        ScaleGrid::new(0, 3, 2, 2).unwrap(),
    ] {
        let scales = vec![1.0; grid.len()];
        let mut out = vec![0.0; grid.len()];
        amax_rows::<f32>(&[], 0, &grid, &mut out);
        assert!(out.iter().all(|amax| *amax == 0.0));
        encode_rows::<f32>(&Cast::new(Format::E4M3), &[], 0, &grid, &scales, &mut []);
        decode_rows::<f32>(Format::E4M3, &[], 0, &grid, &scales, &mut []);
    }
}

#[test]
fn impossible_grids_are_refused() {
    assert_eq!(
        ScaleGrid::new(2, 2, 0, 3),
        Err(GridError::EmptyBlock {
            block_rows: 0,
            block_cols: 3
        })
    );
    assert_eq!(
        ScaleGrid::new(usize::MAX, 2, 1, 1),
        Err(GridError::TooLarge {
            rows: usize::MAX,
            cols: 2
        })
    );
}

#[test]
fn amax_lets_nan_win_over_infinity() {
    let grid = ScaleGrid::per_row(2, 3);
    let mut out = vec![0.0; 2];
    amax_rows(
        &[
            1.0f32,
            f32::INFINITY,
            -2.0,
            f32::NEG_INFINITY,
            f32::NAN,
            0.0,
        ],
        0,
        &grid,
        &mut out,
    );
    assert_eq!(out[0], f32::INFINITY);
    assert!(out[1].is_nan());
    amax_rows(&[5.0f32; 6], 0, &grid, &mut out);
    assert!(out[0] == f32::INFINITY && out[1].is_nan());
    assert_eq!(amax::<f32>(&[]), 0.0);
    assert_eq!(amax(&[1e300f64, -1.0]), f32::INFINITY);
}

#[test]
#[should_panic(expected = "3 elements are no whole number of rows of 2")]
fn a_torn_row_panics() {
    amax_rows(&[0f32; 3], 0, &ScaleGrid::tensorwise(2, 2), &mut [0.0]);
}

#[test]
#[should_panic(expected = "2 rows from row 1 do not fit a matrix of 2 rows")]
fn rows_beyond_the_matrix_panic() {
    amax_rows(&[0f32; 4], 1, &ScaleGrid::tensorwise(2, 2), &mut [0.0]);
}
