//! Sums and maxima.

use super::data::{assert_same, bits, cast, numbers, tensor, values};
use candle_core::{DType, Device, Tensor};
use fp8_ranks::{GroupOptions, ProcessGroup, ReduceOp, SumOrder};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
const LENGTHS: [usize; 7] = [0, 1, 2, 3, 5, 1000, 10_007];

/// The definition: ((rank 0 + rank 1) + rank 2) + .., 16-bit floats in f32.
fn summed(ranks: impl Iterator<Item = usize>, len: usize, dtype: DType) -> Tensor {
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let own = |rank: usize| cast(&tensor(&values(rank, len), dtype), wide);
    let sum = ranks
        .map(own)
        .reduce(|sum, own| (sum + own).expect("a sum"));
    cast(&sum.expect("one rank at least"), dtype)
}

pub fn sums_are_in_rank_order(group: &ProcessGroup) {
    let ranks = group.size();
    for dtype in FLOATS {
        for len in LENGTHS {
            let own = tensor(&values(group.rank(), len), dtype);
            let got = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
            assert_same(
                &got,
                &summed(0..ranks, len, dtype),
                &format!("{dtype:?} {len}"),
            );
        }
    }
    // Otherwise this test would say nothing about the order.
    let other = summed((0..ranks).rev(), 10_007, DType::F32);
    let same = bits(&other) == bits(&summed(0..ranks, 10_007, DType::F32));
    assert_eq!(same, ranks < 3);
    for dtype in [DType::U32, DType::I64] {
        let all = (0..ranks).map(|rank| numbers(rank, 77, dtype));
        let expected = all.reduce(|sum, own| (sum + own).expect("a sum"));
        let own = numbers(group.rank(), 77, dtype);
        let got = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
        assert_same(&got, &expected.expect("one rank"), &format!("{dtype:?}"));
    }
    // Any shape, contiguous or not.
    let own = tensor(&values(group.rank(), 60), DType::F32);
    let own = own
        .reshape((3, 4, 5))
        .expect("a shape")
        .transpose(0, 2)
        .expect("a view");
    let got = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    let expected = summed(0..ranks, 60, DType::F32)
        .reshape((3, 4, 5))
        .expect("a shape");
    assert_same(&got, &expected.transpose(0, 2).expect("a view"), "a view");
    let one = Tensor::new(0.5f32, &Device::Cpu).expect("a scalar");
    let got = group.all_reduce(&one, ReduceOp::Sum).expect("all_reduce");
    assert_eq!(
        got.to_scalar::<f32>().expect("a scalar"),
        0.5 * ranks as f32
    );
}

pub fn sums_do_not_depend_on_calls(group: &ProcessGroup) {
    let own = tensor(&values(group.rank(), 10_000), DType::F32);
    let whole = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
    for parts in [2, 3, 7] {
        let mut got = vec![];
        for part in 0..parts {
            let (begin, end) = (10_000 * part / parts, 10_000 * (part + 1) / parts);
            let own = own.narrow(0, begin, end - begin).expect("a part");
            got.push(group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce"));
        }
        assert_same(
            &Tensor::cat(&got, 0).expect("parts"),
            &whole,
            &format!("{parts} parts"),
        );
    }
    let counts: Vec<_> = (0..group.size())
        .map(|rank| {
            if rank == 0 {
                10_000 - 10 * (group.size() - 1)
            } else {
                10
            }
        })
        .collect();
    let own = group
        .reduce_scatter(&own, &counts, ReduceOp::Sum)
        .expect("reduce_scatter");
    let got = group.all_gather(&own, &counts).expect("all_gather");
    assert_same(&got, &whole, "reduce_scatter and all_gather");
}

/// The bits are the engine's, but the same on all ranks; whole numbers have one sum.
pub fn engine_sums(group: &ProcessGroup) {
    let options = group.options().with_sum_order(SumOrder::Engine);
    let group = group.with_options(options);
    for dtype in FLOATS {
        let own = numbers(group.rank(), 3000, dtype);
        let got = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
        let all = (0..group.size()).map(|rank| numbers(rank, 3000, DType::F32));
        let expected = all.reduce(|sum, own| (sum + own).expect("a sum"));
        assert_same(
            &got,
            &cast(&expected.expect("one rank"), dtype),
            &format!("{dtype:?}"),
        );
        let own = tensor(&values(group.rank(), 3000), dtype);
        let got = group.all_reduce(&own, ReduceOp::Sum).expect("all_reduce");
        let all = group
            .all_gather(&got, &vec![3000; group.size()])
            .expect("all_gather");
        for rank in 0..group.size() {
            let other = all.narrow(0, 3000 * rank, 3000).expect("rows");
            assert_same(&other, &got, "the sums of two ranks");
        }
    }
    assert_eq!(GroupOptions::default().sum_order, SumOrder::Ranks);
}

pub fn maxima(group: &ProcessGroup) {
    let ranks = group.size();
    let dtypes = [
        DType::U8,
        DType::U32,
        DType::I64,
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::F16,
    ];
    for dtype in dtypes {
        for len in LENGTHS {
            let of = |rank: usize| match dtype {
                DType::U8 | DType::U32 | DType::I64 => numbers(rank, len, dtype),
                _ => tensor(&values(rank, len), dtype),
            };
            let expected = (0..ranks)
                .map(of)
                .reduce(|a, b| a.maximum(&b).expect("a maximum"));
            let got = group
                .all_reduce(&of(group.rank()), ReduceOp::Max)
                .expect("all_reduce");
            assert_same(
                &got,
                &expected.expect("one rank"),
                &format!("{dtype:?} {len}"),
            );
        }
    }
}

pub fn nan_is_the_maximum(group: &ProcessGroup) {
    let ranks = group.size();
    for dtype in FLOATS {
        // Element r has its NaN on rank r, of either sign; the last is infinite on rank 0.
        let mut own = vec![1.0; ranks + 1];
        own[group.rank()] = if group.rank().is_multiple_of(2) {
            f64::NAN
        } else {
            -f64::NAN
        };
        own[ranks] = if group.rank() == 0 {
            f64::INFINITY
        } else {
            -3.0
        };
        let got = group
            .all_reduce(&tensor(&own, dtype), ReduceOp::Max)
            .expect("all_reduce");
        let got = cast(&got, DType::F64).to_vec1::<f64>().expect("values");
        assert!(
            got[..ranks].iter().all(|value| value.is_nan()),
            "{dtype:?}: {got:?}"
        );
        assert_eq!(got[ranks], f64::INFINITY);
        let own = if group.rank() == 0 { -0.0 } else { 0.0 };
        let got = group
            .all_reduce(&tensor(&[own], dtype), ReduceOp::Max)
            .expect("all_reduce");
        assert_eq!(
            bits(&got),
            bits(&tensor(&[if ranks == 1 { -0.0 } else { 0.0 }], dtype))
        );
    }
}

pub fn amaxes(group: &ProcessGroup) {
    use fp8_ranks::ReductionGroup;
    let ranks = group.size();
    let of = |rank: usize| -> Vec<f32> {
        let mut amaxes: Vec<_> = values(rank, 300)
            .iter()
            .map(|value| value.abs() as f32)
            .collect();
        amaxes[rank] = f32::NAN;
        amaxes[10 + rank] = f32::INFINITY;
        amaxes[20] = if rank.is_multiple_of(2) { 0.0 } else { -0.0 };
        amaxes
    };
    let own = Tensor::new(of(group.rank()), &Device::Cpu).expect("a tensor");
    let got = group.all_reduce_max(&own).expect("all_reduce_max");
    let got = got.to_vec1::<f32>().expect("values");
    assert_eq!(got.len(), 300);
    for (i, got) in got.into_iter().enumerate() {
        let all = (0..ranks).map(|rank| of(rank)[i]);
        if i < ranks {
            assert!(got.is_nan(), "{i}: {got}");
        } else {
            assert_eq!(got.to_bits(), all.fold(0f32, f32::max).to_bits(), "{i}");
        }
    }
    assert_eq!(group.ranks(), ranks);
}

pub fn reduce_scatter(group: &ProcessGroup) {
    let ranks = group.size();
    let divisions = [
        vec![4; ranks],
        (0..ranks).map(|rank| (rank + 1) % 2 * 9 + rank).collect(),
        (0..ranks)
            .map(|rank| if rank + 1 == ranks { 11 } else { 0 })
            .collect(),
    ];
    for dtype in FLOATS {
        for counts in &divisions {
            for width in [1, 6] {
                let rows: usize = counts.iter().sum();
                let shaped = |flat: Tensor| flat.reshape((rows, width)).expect("rows");
                let begin: usize = counts[..group.rank()].iter().sum();
                let own_rows =
                    |all: Tensor| all.narrow(0, begin, counts[group.rank()]).expect("rows");
                let own = shaped(tensor(&values(group.rank(), rows * width), dtype));
                let got = group
                    .reduce_scatter(&own, counts, ReduceOp::Sum)
                    .expect("reduce_scatter");
                let expected = own_rows(shaped(summed(0..ranks, rows * width, dtype)));
                assert_same(&got, &expected, &format!("sum {dtype:?} {counts:?}"));
                let got = group
                    .reduce_scatter(&own, counts, ReduceOp::Max)
                    .expect("reduce_scatter");
                let whole = group.all_reduce(&own, ReduceOp::Max).expect("all_reduce");
                assert_same(
                    &got,
                    &own_rows(whole),
                    &format!("maximum {dtype:?} {counts:?}"),
                );
            }
        }
    }
}
