//! A row of a product has the bits that it has alone, whatever the number of rows beside it.

use super::*;
use candle_core::Storage;

/// Scales that wait for the end of a sum, that change within it, and that change within a tile.
const GRANULARITIES: [(Granularity, Granularity); 9] = [
    (Granularity::Tensorwise, Granularity::Tensorwise),
    (Granularity::Rowwise, Granularity::Rowwise),
    (Granularity::Rowwise, Granularity::Tensorwise),
    (BLOCK_1X128, BLOCK_128X128),
    (Granularity::Rowwise, BLOCK_128X128),
    (
        Granularity::Blockwise { rows: 1, cols: 96 },
        Granularity::Rowwise,
    ),
    (Granularity::Mx, Granularity::Mx),
    (
        Granularity::Blockwise { rows: 1, cols: 20 },
        Granularity::Tensorwise,
    ),
    (
        Granularity::Blockwise { rows: 3, cols: 33 },
        Granularity::Blockwise { rows: 2, cols: 33 },
    ),
];

/// One of some numbers, around the edges of tiles, panels and slices, and of the ways that products take.
fn size(rng: &mut StdRng, ranges: &[std::ops::Range<usize>]) -> usize {
    let range = ranges[rng.random_range(0..ranges.len())].clone();
    rng.random_range(range)
}

/// Row `row` of operand A, which is `whole`, with its scales.
fn alone(whole: &Operand, row: usize) -> Result<Operand> {
    let tensor = &whole.tensor;
    let codes: Vec<u8> = tensor.codes().flatten_all()?.to_vec1()?;
    let scales: Vec<f32> = tensor.dequant_scale().flatten_all()?.to_vec1()?;
    let (rows, cols) = tensor.codes().dims2()?;
    let (contraction, granularity) = (whole.contraction, tensor.granularity());
    let (kept, k) = match contraction {
        Cols => (rows, cols),
        Rows => (cols, rows),
    };
    assert!(row < kept);
    let place = |row: usize, l: usize| match contraction {
        Cols => (row, l),
        Rows => (l, row),
    };
    let grid = granularity.grid(rows, cols, contraction);
    let (one_rows, one_cols) = match contraction {
        Cols => (1, k),
        Rows => (k, 1),
    };
    let one = granularity.grid(one_rows, one_cols, contraction);
    let mut one_scales = vec![0.; one.len()];
    let mut one_codes = vec![];
    for l in 0..k {
        let (at_row, at_col) = place(row, l);
        one_codes.push(codes[at_row * cols + at_col]);
        let (one_row, one_col) = place(0, l);
        one_scales[one.index(one_row, one_col)] = scales[grid.index(at_row, at_col)];
    }
    let kind = (tensor.format(), granularity, contraction);
    Operand::from_parts(
        (one_rows, one_cols),
        one_codes,
        one_scales,
        kind,
        contraction,
    )
}

/// The product; with `packed`, B's codes as weights from files have them.
fn product(
    a: &Operand,
    b: &Operand,
    packed: Option<&Tensor>,
    (dtype, bias): (DType, Option<&Tensor>),
) -> Result<Vec<u64>> {
    let out = GemmOutput {
        dtype,
        bias,
        use_fast_accum: false,
    };
    let a = a.tensor.operand(a.contraction);
    let mut b = b.tensor.operand(b.contraction);
    if let Some(packed) = packed {
        b.codes = GemmCodes::Packed(packed);
    }
    let storage: Storage = backend(&device())?.gemm(&a, &b, &out)?;
    let shape = (a.kept(), b.kept());
    let y = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
    Ok(flat64(&y).iter().map(|y| y.to_bits()).collect())
}

#[test]
fn each_row_has_the_bits_that_it_has_alone() -> Result<()> {
    if on_cuda() {
        skipped("rows alone: a GPU's library chooses its own order of sums");
        return Ok(());
    }
    const CASES: usize = 10_000;
    let mut rng = StdRng::seed_from_u64(30);
    let dtypes = [DType::F32, DType::BF16, DType::F16, DType::F32];
    for case in 0..CASES as u64 {
        let rare = case % 16 == 0;
        let m = match rare {
            true => size(&mut rng, &[185..200, 280..300, 380..400]),
            false => size(&mut rng, &[1..5, 2..14, 10..40, 30..50, 90..100]),
        };
        let n = size(&mut rng, &[1..5, 10..40, 60..70, 30..34]);
        let k = match rng.random_range(0..8) {
            0 => size(&mut rng, &[500..530, 760..780, 1000..1060]),
            1 | 2 => size(&mut rng, &[250..262, 280..300]),
            _ => size(&mut rng, &[1..70, 60..68, 100..200]),
        };
        let (a_granularity, b_granularity) = GRANULARITIES[rng.random_range(0..9)];
        let (a_format, b_format) = FORMATS[rng.random_range(0..3)];
        // Activations are row-major; the other orders come rarely.
        let (a_contraction, b_contraction) = match rng.random_range(0..3) {
            0 => COMBINATIONS[rng.random_range(0..4)],
            _ => (Cols, Cols),
        };
        let a = Operand::new(case, (m, k), (a_format, a_granularity, a_contraction))?;
        let b = Operand::new(case + 1, (n, k), (b_format, b_granularity, b_contraction))?;
        let dtype = dtypes[rng.random_range(0..4)];
        let bias = rng.random::<bool>().then(|| {
            let values = (0..n).map(|i| (i as f32 * 0.37).sin());
            Tensor::from_iter(values, &device())
        });
        let bias = bias.transpose()?;
        let out = (dtype, bias.as_ref());
        let packed = match b_contraction == Cols && rng.random::<bool>() {
            true => backend(&device())?.pack(b.tensor.codes(), b.tensor.format())?,
            false => None,
        };
        let all = product(&a, &b, packed.as_ref(), out)?;
        for row in [0, m - 1, rng.random_range(0..m)] {
            let row_alone = product(&alone(&a, row)?, &b, packed.as_ref(), out)?;
            assert_eq!(
                row_alone,
                all[row * n..][..n],
                "row {row} of {m}, n {n} k {k}, {a_format} {a_granularity} {a_contraction:?} x {b_format} {b_granularity} \
                 {b_contraction:?}, packed {}, {dtype:?}, bias {}",
                packed.is_some(),
                bias.is_some()
            );
        }
    }
    Ok(())
}

/// Results that some levels write past the caches, a cache line at a time: with rows that begin anywhere in a line, and tasks side by
/// side that share a line.
#[test]
fn rows_of_large_results_have_the_bits_that_they_have_alone() -> Result<()> {
    if on_cuda() {
        skipped("rows alone: a GPU's library chooses its own order of sums");
        return Ok(());
    }
    let mut rng = StdRng::seed_from_u64(31);
    let sizes = [
        (1500, 1449, 40),
        (2100, 1024, 600),
        (1030, 2080, 257),
        (193, 10900, 70),
        (4400, 500, 33),
    ];
    for (case, (m, n, k)) in sizes.into_iter().enumerate() {
        let (a_contraction, b_contraction) = COMBINATIONS[case % 4];
        let granularity = GRANULARITIES[case % 3].0;
        let seed = case as u64;
        let a = Operand::new(seed, (m, k), (FORMATS[0].0, granularity, a_contraction))?;
        let b = Operand::new(seed + 9, (n, k), (FORMATS[0].1, granularity, b_contraction))?;
        let bias = (0..n).map(|i| (i as f32 * 0.37).sin());
        let bias = Tensor::from_iter(bias, &device())?;
        let out = (DType::F32, (case % 2 == 0).then_some(&bias));
        let mut rows: Vec<usize> = (0..12).map(|_| rng.random_range(0..m)).collect();
        rows.extend([0, 31, 32, m - 1]);
        let expected: Vec<_> = rows
            .iter()
            .map(|&row| product(&alone(&a, row)?, &b, None, out))
            .collect::<Result<_>>()?;
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().unwrap();
            let all = pool.install(|| product(&a, &b, None, out))?;
            for (row, expected) in rows.iter().zip(&expected) {
                let what = format!("row {row} of {m}, n {n} k {k}, {threads} threads");
                assert_eq!(&all[row * n..][..n], expected, "{what}");
            }
        }
    }
    Ok(())
}
