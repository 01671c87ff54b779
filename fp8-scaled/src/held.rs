//! Compares kernels with their definitions in every dtype. Choose parameters for which the results are normal numbers.

use super::kernels::{Axpby, Each, Map, Product, Quotient, Times, map, wide};
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::elements::RowKernel;

/// Numbers of both signs, some of them equal, none close to 0.
fn numbers(seed: usize, dtype: DType, positive: bool) -> Tensor {
    let numbers = (0..999).map(|i| {
        let x = ((i * (37 + seed) + seed) % 61) as f32 / 16.0 - 1.9;
        if positive { x.abs() + 0.1 } else { x }
    });
    Tensor::from_iter(numbers, &Device::Cpu)
        .and_then(|x| x.to_dtype(dtype))
        .unwrap()
}

/// Within an ulp of a 16-bit dtype and a few of the others, relative to 1 below it.
fn close(got: &Tensor, expected: &Tensor) {
    let tolerance = match got.dtype() {
        DType::BF16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        DType::F32 => 1e-6,
        _ => 1e-13,
    };
    let to_vec = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    for (got_one, expected_one) in to_vec(got).into_iter().zip(to_vec(expected)) {
        let error = (got_one - expected_one).abs() / expected_one.abs().max(1.0);
        assert!(
            error <= tolerance,
            "{:?}: {got_one} instead of {expected_one}",
            got.dtype()
        );
    }
}

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

pub(super) fn check<const N: usize, F: Map<N>>(f: F, positive: bool)
where
    Each<F>: RowKernel<N>,
{
    for dtype in DTYPES {
        let args: [Tensor; N] = std::array::from_fn(|i| numbers([0, 5, 11][i], dtype, positive));
        let expected = wide(args.each_ref(), |args| f.composed(args)).unwrap();
        close(&map("test", f, args.each_ref()).unwrap(), &expected);
    }
}

#[test]
fn the_kernels_here() {
    let k = 0.75;
    check(Times { k }, false);
    check(Axpby { a: k, b: -2.0 }, false);
    check(Product { k }, false);
    check(Quotient { k }, true);
}
