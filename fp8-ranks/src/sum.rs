//! Sums in the order of ranks, and maxima as integers: the same bits on every engine, however data is cut into calls.

use crate::error::Failure;
use candle_core::{DType, Device, Storage, Tensor};

/// What [`crate::ProcessGroup::all_reduce`] and `reduce_scatter` do with the ranks' elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum, in the order of [`SumOrder`]; bf16 and f16 are added in f32 and rounded once. F32, F64, BF16, F16; U32 and I64
    /// wrap around.
    Sum,
    /// Their maximum. Any NaN gives NaN, and 0 is more than -0. F32, F64, BF16, F16, U8, U32, I64.
    Max,
}

/// The order in which [`ReduceOp::Sum`] adds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SumOrder {
    /// ((rank 0 + rank 1) + rank 2) + ..: every rank gets pieces of all, adds them in this order, and the sums are gathered. It
    /// sends what a ring sends, and its bits depend on the number of ranks only.
    #[default]
    Ranks,
    /// `all_reduce` of F32 and F64 (BF16 and F16 in F32) is the engine's own. Its **bits then depend on the engine, its version, the
    /// number of ranks and the length of the tensor**: a bucket of another size gives other sums. `reduce_scatter` stays in the
    /// order of ranks.
    Engine,
}

/// Elements of each rank when `len` are dealt out evenly.
pub(crate) fn even(len: usize, ranks: usize) -> Vec<usize> {
    let begin = |rank: usize| (len as u128 * rank as u128 / ranks as u128) as usize;
    (0..ranks)
        .map(|rank| begin(rank + 1) - begin(rank))
        .collect()
}

/// The result of `op` for pieces of the same length that lie one after the other.
pub(crate) fn combine(pieces: &Tensor, ranks: usize, op: ReduceOp) -> Result<Tensor, Failure> {
    let dtype = pieces.dtype();
    if matches!(dtype, DType::BF16 | DType::F16) {
        let wide = pieces.to_dtype(DType::F32)?;
        return Ok(combine(&wide, ranks, op)?.to_dtype(dtype)?);
    }
    let device = pieces.device();
    let len = pieces.elem_count() / ranks;
    if !device.is_cpu() && op == ReduceOp::Sum {
        let piece = |rank: usize| pieces.narrow(0, rank * len, len);
        let first = piece(0)?.copy()?;
        return Ok((1..ranks).try_fold(first, |sum, rank| sum + piece(rank)?)?);
    }
    let pieces = pieces.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = pieces.storage_and_layout();
    let begin = layout.start_offset();
    let range = begin..begin + len * ranks;
    use candle_core::cpu_backend::CpuStorage as Cpu;
    let Storage::Cpu(storage) = &*storage else {
        unreachable!("moved to the CPU above");
    };
    macro_rules! fold {
        ($data:expr, $function:expr) => {
            Tensor::from_vec(fold(&$data[range], len, $function), len, device)?
        };
    }
    Ok(match (op, storage) {
        (ReduceOp::Sum, Cpu::F32(data)) => fold!(data, |a, b| a + b),
        (ReduceOp::Sum, Cpu::F64(data)) => fold!(data, |a, b| a + b),
        (ReduceOp::Sum, Cpu::U32(data)) => fold!(data, u32::wrapping_add),
        (ReduceOp::Sum, Cpu::I64(data)) => fold!(data, i64::wrapping_add),
        (ReduceOp::Max, Cpu::F32(data)) => {
            fold!(data, |a, b| if key32(a) >= key32(b) { a } else { b })
        }
        (ReduceOp::Max, Cpu::F64(data)) => {
            fold!(data, |a, b| if key64(a) >= key64(b) { a } else { b })
        }
        (ReduceOp::Max, Cpu::U8(data)) => fold!(data, u8::max),
        (ReduceOp::Max, Cpu::U32(data)) => fold!(data, u32::max),
        (ReduceOp::Max, Cpu::I64(data)) => fold!(data, i64::max),
        (op, _) => return check(op, dtype).map(|()| unreachable!("{dtype:?} is checked before")),
    })
}

/// # Errors
/// `op` does not take `dtype`.
pub(crate) fn check(op: ReduceOp, got: DType) -> Result<(), Failure> {
    use DType::{BF16, F16, F32, F64, I64, U8, U32};
    match (op, got) {
        (_, F32 | F64 | BF16 | F16 | U32 | I64) | (ReduceOp::Max, U8) => Ok(()),
        (ReduceOp::Sum, _) => Err(Failure::DType {
            got,
            expected: "F32, F64, BF16, F16, U32 or I64 for a sum",
        }),
        (ReduceOp::Max, _) => Err(Failure::DType {
            got,
            expected: "F32, F64, BF16, F16, U8, U32 or I64 for a maximum",
        }),
    }
}

/// Combines the pieces with the first one, one after the other.
fn fold<T: Copy>(pieces: &[T], len: usize, function: impl Fn(T, T) -> T + Copy) -> Vec<T> {
    let mut sum = pieces[..len].to_vec();
    // Without elements there are no pieces to go through, and `chunks_exact` refuses a length of 0.
    if len > 0 {
        for piece in pieces[len..].chunks_exact(len) {
            for (sum, value) in sum.iter_mut().zip(piece) {
                *sum = function(*sum, *value);
            }
        }
    }
    sum
}

/// Integers in the order of [`ReduceOp::Max`]: numbers by value, -0 before 0, every NaN above all.
fn key32(value: f32) -> u32 {
    match value.to_bits() {
        _ if value.is_nan() => u32::MAX,
        bits if bits >> 31 == 1 => !bits,
        bits => bits | 1 << 31,
    }
}

fn key64(value: f64) -> u64 {
    match value.to_bits() {
        _ if value.is_nan() => u64::MAX,
        bits if bits >> 63 == 1 => !bits,
        bits => bits | 1 << 63,
    }
}

/// [`key32`] of all elements of a flat F32 tensor, as U32: engines disagree about NaN, not about integers.
pub(crate) fn keys(values: &Tensor) -> Result<Tensor, Failure> {
    let keys: Vec<_> = values.to_vec1()?.into_iter().map(key32).collect();
    Ok(Tensor::new(keys, values.device())?)
}

/// The values of [`keys`].
pub(crate) fn values(keys: &Tensor) -> Result<Tensor, Failure> {
    let value = |key: u32| match key {
        u32::MAX => f32::NAN,
        key if key >> 31 == 1 => f32::from_bits(key & !(1 << 31)),
        key => f32::from_bits(!key),
    };
    let values: Vec<_> = keys.to_vec1()?.into_iter().map(value).collect();
    Ok(Tensor::new(values, keys.device())?)
}

/// Amaxes as their own bits without a sign, whose order is that of the values with NaN as the largest.
pub(crate) fn amax_bits(amaxes: &Tensor) -> Result<Tensor, Failure> {
    let bits = |amax: f32| amax.to_bits() & !(1 << 31);
    let bits: Vec<_> = amaxes.to_vec1()?.into_iter().map(bits).collect();
    Ok(Tensor::new(bits, amaxes.device())?)
}

/// The amaxes of [`amax_bits`].
pub(crate) fn amaxes(bits: &Tensor) -> Result<Tensor, Failure> {
    let amaxes: Vec<_> = bits.to_vec1()?.into_iter().map(f32::from_bits).collect();
    Ok(Tensor::new(amaxes, bits.device())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_order_of_values() -> Result<(), Failure> {
        let tiny = f32::from_bits(1);
        let (low, high) = (f32::NEG_INFINITY, f32::INFINITY);
        let order = [low, -2.0, -1.5, -tiny, -0.0, 0.0, tiny, 1.0, f32::MAX, high];
        assert!(order.windows(2).all(|two| key32(two[0]) < key32(two[1])));
        assert!(
            order
                .windows(2)
                .all(|two| key64(two[0].into()) < key64(two[1].into()))
        );
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0xff80_0001)] {
            assert!(key32(nan) > key32(high) && key64(nan.into()) > key64(f64::INFINITY));
        }
        let back = values(&keys(&Tensor::new(&order, &Device::Cpu)?)?)?.to_vec1::<f32>()?;
        let bits = |values: &[f32]| {
            values
                .iter()
                .map(|value| value.to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(bits(&back), bits(&order));
        Ok(())
    }

    #[test]
    fn even_parts_are_whole_and_differ_by_one() {
        for ranks in 1..9 {
            for len in 0..40 {
                let parts = even(len, ranks);
                assert_eq!(parts.iter().sum::<usize>(), len);
                assert!(parts.iter().all(|part| part.abs_diff(len / ranks) <= 1));
            }
        }
        assert_eq!(even(usize::MAX, 2)[0], usize::MAX / 2);
    }
}
