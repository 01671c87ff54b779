//! Sums of two tensors. candle would add on its own threads, which wait for each other in busy loops, and in bf16 many times slower.

use crate::base::error::Result;
use crate::base::parallel;
use crate::base::simd::simd;
use crate::device::cpu::elements::{Buffer, Element, for_dtype, map_rows, tensor, with_slices};
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor};

/// `a + b` of one shape and dtype, outside any graph.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let floats = [DType::F32, DType::F64, DType::BF16, DType::F16];
    let ours = a.device().is_cpu() && floats.contains(&a.dtype());
    if !ours || (a.dims(), a.dtype()) != (b.dims(), b.dtype()) || !b.device().is_cpu() {
        return Ok((a.detach() + b.detach())?);
    }
    for_dtype!("add", a.dtype(), T => {
        with_slices([a, b], |slices: [&[T]; 2]| {
            let sums = map_rows(slices, 1, |_, [a, b], sums| {
                simd(
                    #[inline(always)]
                    || {
                        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
                            *sum = a + b;
                        }
                    },
                );
            });
            tensor(sums, a.shape())
        })?
    })
}

/// `total + part`, in the storage of `total` on the CPU.
pub(crate) fn add_into(total: Tensor, part: &Tensor) -> Result<Tensor> {
    let in_place = total.device().is_cpu()
        && total.is_contiguous()
        && part.is_contiguous()
        && total.dtype() == part.dtype();
    // candle takes strides of a tensor without elements for overlapping ones.
    if !in_place || total.elem_count() == 0 {
        return Ok((total + part)?);
    }
    total.inplace_op2(part, &AddInto)?;
    Ok(total)
}

struct AddInto;

impl InplaceOp2 for AddInto {
    fn name(&self) -> &'static str {
        "add-into"
    }

    fn cpu_fwd(
        &self,
        total: &mut CpuStorage,
        total_layout: &Layout,
        part: &CpuStorage,
        part_layout: &Layout,
    ) -> candle_core::Result<()> {
        let range = |layout: &Layout| {
            let start = layout.start_offset();
            start..start + layout.shape().elem_count()
        };
        let (range, parts) = (range(total_layout), range(part_layout));
        match (total, part) {
            (CpuStorage::F32(total), CpuStorage::F32(part)) => {
                add_slice(&mut total[range], &part[parts])
            }
            (CpuStorage::F64(total), CpuStorage::F64(part)) => {
                add_slice(&mut total[range], &part[parts])
            }
            (CpuStorage::BF16(total), CpuStorage::BF16(part)) => {
                add_slice(&mut total[range], &part[parts])
            }
            (CpuStorage::F16(total), CpuStorage::F16(part)) => {
                add_slice(&mut total[range], &part[parts])
            }
            (total, _) => {
                use candle_core::backend::BackendStorage;
                candle_core::bail!("add-into: {:?} is not a float", total.dtype())
            }
        }
        Ok(())
    }
}

/// Rounds every sum.
fn add_slice<T: Element>(total: &mut [T], part: &[T]) {
    const TASK: usize = 1 << 15;
    let tasks = total.chunks_mut(TASK).zip(part.chunks(TASK));
    parallel::for_each(tasks, |(total, part)| {
        let mut buffer = Buffer::default();
        let part = T::load(part, &mut buffer);
        T::update(total, |total| {
            simd(
                #[inline(always)]
                || {
                    for (total, &part) in total.iter_mut().zip(part) {
                        *total += part;
                    }
                },
            );
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use fp8_test_support::assert_same;

    #[test]
    fn sums_are_those_of_candle() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64] {
            let of = |factor: f64| -> Result<Tensor> {
                let x = Tensor::arange(0i64, 70_000, &Device::Cpu)?.to_dtype(DType::F64)?;
                Ok((x * factor)?.to_dtype(dtype)?.reshape((700, 100))?.t()?)
            };
            let (a, b) = (of(1.37)?, of(-0.0119)?);
            // Bits, since the largest sums in f16 are infinite, and a difference of those is NaN.
            assert_same(&format!("{dtype:?}"), &add(&a, &b)?, &(&a + &b)?);
        }
        let (a, b) = (
            Tensor::ones(3, DType::F32, &Device::Cpu)?,
            Tensor::ones(4, DType::F32, &Device::Cpu)?,
        );
        let error = add(&a, &b).unwrap_err().to_string();
        assert!(error.contains("shape mismatch in add"), "{error}");
        Ok(())
    }
}
