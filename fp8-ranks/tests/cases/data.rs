//! Data that every rank can compute for every other.

use candle_core::{DType, Device, Tensor};

/// All dtypes that travel.
pub const DTYPES: [DType; 10] = [
    DType::U8,
    DType::U32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::I16,
    DType::I32,
    DType::F8E4M3,
];

/// A well mixed number for element `i` of `rank`.
pub fn mixed(rank: usize, i: usize) -> u64 {
    let mut x = (rank as u64) << 40 ^ i as u64 ^ 0x9e37_79b9_7f4a_7c15;
    for _ in 0..2 {
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    }
    x ^ x >> 31
}

/// Elements of both signs over several powers of two, so that the order of a sum shows in its bits.
pub fn values(rank: usize, len: usize) -> Vec<f64> {
    let value = |i| {
        let bits = mixed(rank, i);
        let size = 2f64.powi((bits >> 56 & 15) as i32 - 8);
        ((bits & 0xff_ffff) as f64 / 8_388_608.0 - 1.0) * size
    };
    (0..len).map(value).collect()
}

/// Whole numbers from 0 to 199 in any dtype.
pub fn numbers(rank: usize, len: usize, dtype: DType) -> Tensor {
    let numbers: Vec<_> = (0..len).map(|i| (mixed(rank, i) % 200) as u32).collect();
    let numbers = Tensor::from_vec(numbers, len, &Device::Cpu).expect("a tensor");
    cast(&numbers, dtype)
}

pub fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).expect("a cast")
}

pub fn tensor(values: &[f64], dtype: DType) -> Tensor {
    let values = Tensor::new(values, &Device::Cpu).expect("a tensor");
    cast(&values, dtype)
}

/// Shape, dtype and all bits.
#[track_caller]
pub fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.dtype(), expected.dtype(), "{what}");
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (bits(got), bits(expected));
    let differs = (0..got.len()).find(|i| got[*i] != expected[*i]);
    if let Some(i) = differs {
        panic!(
            "{what}: element {i}: {:#x} instead of {:#x}",
            got[i], expected[i]
        );
    }
}

/// The bits of all elements.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    fn of<T: candle_core::WithDType>(tensor: &Tensor, bits: impl Fn(T) -> u64) -> Vec<u64> {
        let values = tensor.flatten_all().and_then(|flat| flat.to_vec1::<T>());
        values.expect("values").into_iter().map(bits).collect()
    }
    match tensor.dtype() {
        DType::U8 => of(tensor, |x: u8| x.into()),
        DType::U32 => of(tensor, |x: u32| x.into()),
        DType::I16 => of(tensor, |x: i16| x as u64),
        DType::I32 => of(tensor, |x: i32| x as u64),
        DType::I64 => of(tensor, |x: i64| x as u64),
        DType::BF16 => of(tensor, |x: half::bf16| x.to_bits().into()),
        DType::F16 => of(tensor, |x: half::f16| x.to_bits().into()),
        DType::F8E4M3 => of(tensor, |x: float8::F8E4M3| x.to_bits().into()),
        DType::F32 => of(tensor, |x: f32| x.to_bits().into()),
        DType::F64 => of(tensor, |x: f64| x.to_bits()),
        other => panic!("no bits of {other:?}"),
    }
}
