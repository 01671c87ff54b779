//! Delayed scaling on the device: no amax and no scale comes to the host.

use super::gpu::{Gpu, with_pointer_list, with_pointers};
use super::kernels::{Arg, Shape, kernels, launch};
use crate::delayed::SlotTensors;
use crate::device::Backend;
use candle_core::{DType, Device, Result, Tensor};
use fp8_core::{AmaxCompute, DelayedRule, Format, ScaleRounding};

kernels! { DELAYED_KERNELS in DELAYED;
    MERGE_AMAXES = one "fp8_merge_amaxes"("ppppl");
    UPDATE_DELAYED = one "fp8_update_delayed"("pppppppplii");
}

/// Addresses as candle can upload them.
fn addresses(gpu: &Gpu, pointers: &[u64]) -> Result<Tensor> {
    let bits: Vec<i64> = pointers
        .iter()
        .map(|pointer| pointer.cast_signed())
        .collect();
    gpu.upload(&bits)
}

/// Largest finite amax of each slot, f32, and how many were not finite, U32.
pub(super) fn merge_amaxes(slots: &[&[Tensor]], device: &Device) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::new(device)?;
    let count = slots.len();
    let (amaxes, counts) = (gpu.alloc(DType::F32, count)?, gpu.alloc(DType::U32, count)?);
    let recorded: Vec<&Tensor> = slots.iter().flat_map(|slot| slot.iter()).collect();
    let mut first = vec![0u32];
    for slot in slots {
        first.push(first[first.len() - 1] + slot.len() as u32);
    }
    let first = gpu.upload(&first)?;
    with_pointer_list(&gpu, &recorded, |pointers| {
        // Never empty: an upload has at least one address.
        let pointers = [pointers, &[0]].concat();
        let table = addresses(&gpu, &pointers)?;
        with_pointers(&gpu, [&table, &first], |[table, first]| {
            let args = [
                Arg::Ptr(table),
                Arg::Ptr(first),
                Arg::Ptr(amaxes.ptr()),
                Arg::Ptr(counts.ptr()),
                Arg::Len(count as u64),
            ];
            // SAFETY: the table holds addresses of f32 tensors of one element or more, alive while this runs in stream
            // order; `first` has count + 1 entries, the outputs count each.
            unsafe { launch(&gpu, &MERGE_AMAXES, Shape::stride(&gpu, count), &args) }
        })
    })?;
    Ok((amaxes.into_tensor(count)?, counts.into_tensor(count)?))
}

/// One update of every slot, all in one launch. A reduction that is code of the user runs on the host, at the price of
/// copies.
pub(super) fn update(
    slots: &[(&SlotTensors, Format)],
    rule: &DelayedRule,
    amaxes: &Tensor,
    non_finite: &Tensor,
) -> Result<Vec<SlotTensors>> {
    let Some((first, _)) = slots.first() else {
        return Ok(vec![]);
    };
    if let AmaxCompute::Custom(_) = rule.amax_compute {
        return on_the_host(slots, rule, amaxes, non_finite);
    }
    let gpu = Gpu::of(&first.quant_scale)?;
    let count = slots.len();
    let len = first.amax_history.elem_count();
    if let Some((other, _)) = (slots.iter()).find(|(slot, _)| slot.amax_history.dims() != [len]) {
        return Err(crate::Error::Shape {
            op: "update_delayed",
            what: "an amax_history",
            expected: format!("[{len}], as that of the other slots"),
            got: other.amax_history.dims().to_vec(),
        }
        .into());
    }
    let margin = 2f64.powi(rule.margin);
    let max_values: Vec<f32> = (slots.iter())
        .map(|(_, format)| (f64::from(Format::max(*format)) / margin) as f32)
        .collect();
    let max_values = gpu.upload(&max_values)?;
    let (amaxes, non_finite) = (amaxes.contiguous()?, non_finite.contiguous()?);
    let state: Vec<&Tensor> = slots
        .iter()
        .flat_map(|(slot, _)| [&slot.quant_scale, &slot.amax_history, &slot.non_finite])
        .collect();
    let quant_scales = gpu.alloc(DType::F32, count)?;
    let dequant_scales = gpu.alloc(DType::F32, count)?;
    let histories = gpu.alloc(DType::F32, (count * len).max(1))?;
    let counts = gpu.alloc(DType::U32, count)?;
    with_pointer_list(&gpu, &state, |pointers| {
        let table = addresses(&gpu, pointers)?;
        let inputs = [&table, &amaxes, &non_finite, &max_values];
        with_pointers(&gpu, inputs, |[table, amaxes, non_finite, max_values]| {
            let args = [
                Arg::Ptr(table),
                Arg::Ptr(amaxes),
                Arg::Ptr(non_finite),
                Arg::Ptr(max_values),
                Arg::Ptr(quant_scales.ptr()),
                Arg::Ptr(dequant_scales.ptr()),
                Arg::Ptr(histories.ptr()),
                Arg::Ptr(counts.ptr()),
                Arg::Len(len as u64),
                Arg::Int((rule.amax_compute == AmaxCompute::MostRecent).into()),
                Arg::Int((rule.scale_rounding == ScaleRounding::PowerOfTwo).into()),
            ];
            // SAFETY: a block per slot; the table holds three addresses for each, of histories of len values; every
            // output has a value, or len, per slot.
            unsafe { launch(&gpu, &UPDATE_DELAYED, Shape::blocks(count, 128), &args) }
        })
    })?;
    let quant_scales = quant_scales.into_tensor(count)?;
    let dequant_scales = dequant_scales.into_tensor(count)?;
    let histories = histories.into_tensor((count * len).max(1))?;
    let counts = counts.into_tensor(count)?;
    (0..count)
        .map(|slot| {
            Ok(SlotTensors {
                quant_scale: quant_scales.narrow(0, slot, 1)?,
                dequant_scale: dequant_scales.narrow(0, slot, 1)?,
                amax_history: histories.narrow(0, slot * len, len)?,
                non_finite: counts.narrow(0, slot, 1)?,
            })
        })
        .collect()
}

fn on_the_host(
    slots: &[(&SlotTensors, Format)],
    rule: &DelayedRule,
    amaxes: &Tensor,
    non_finite: &Tensor,
) -> Result<Vec<SlotTensors>> {
    let moved = |slot: &SlotTensors, device: &Device| -> Result<SlotTensors> {
        Ok(SlotTensors {
            quant_scale: slot.quant_scale.to_device(device)?,
            dequant_scale: slot.dequant_scale.to_device(device)?,
            amax_history: slot.amax_history.to_device(device)?,
            non_finite: slot.non_finite.to_device(device)?,
        })
    };
    let device = amaxes.device();
    let here = (slots.iter())
        .map(|(slot, _)| moved(slot, &Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let slots: Vec<_> = (here.iter().zip(slots))
        .map(|(slot, (_, format))| (slot, *format))
        .collect();
    let updated = crate::device::cpu::CpuBackend.update_delayed(
        &slots,
        rule,
        &amaxes.to_device(&Device::Cpu)?,
        &non_finite.to_device(&Device::Cpu)?,
    )?;
    updated.iter().map(|slot| moved(slot, device)).collect()
}
