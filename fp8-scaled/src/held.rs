//! Compares kernels with their definitions in every dtype. Choose parameters for which the results are normal numbers.

use super::kernels::{Axpby, Map1, Map2, Map3, Product, Quotient, Times, map1, map2, map3, wide};
use candle_core::{DType, Device, Tensor};

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

pub(super) fn check1(f: impl Map1, positive: bool) {
    for dtype in DTYPES {
        let x = numbers(0, dtype, positive);
        let expected = wide([&x], |[x]| f.composed(x)).unwrap();
        close(&map1("test", f, &x).unwrap(), &expected);
    }
}

pub(super) fn check2(f: impl Map2, positive: bool) {
    for dtype in DTYPES {
        let (x, y) = (numbers(0, dtype, positive), numbers(5, dtype, positive));
        let expected = wide([&x, &y], |[x, y]| f.composed(x, y)).unwrap();
        close(&map2("test", f, &x, &y).unwrap(), &expected);
    }
}

pub(super) fn check3(f: impl Map3, positive: bool) {
    for dtype in DTYPES {
        let [x, y, z] = [0, 5, 11].map(|seed| numbers(seed, dtype, positive));
        let expected = wide([&x, &y, &z], |[x, y, z]| f.composed(x, y, z)).unwrap();
        close(&map3("test", f, [&x, &y, &z]).unwrap(), &expected);
    }
}

#[test]
fn the_kernels_here() {
    check1(Times(0.75), false);
    check2(Axpby { a: 0.75, b: -2.0 }, false);
    check2(Product(0.75), false);
    check2(Quotient(0.75), true);
}
