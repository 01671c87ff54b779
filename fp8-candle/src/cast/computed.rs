//! Casts of tensors that are computed for the cast alone: row by row on the CPU, tile by tile by kernels of a device.

use crate::base::data::made::Made;
use crate::base::data::matrix_dims;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::cast::kept::{group_grid, made_beside};
use crate::cast::quantizer::{Encoded, Quantizer};
use crate::cast::replay::Replay;
use crate::cast::spec::applied_scale;
use crate::cast::state::Scales;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::cpu::elements::{for_dtype, with_slices};
use crate::device::{
    Beside, Codes, GroupCodes, Groups, MadeRows, Plain, Stored, backend, encode_rows, made_casts,
};
use candle_core::{DType, Device, Tensor};
use fp8_core::{Contraction, Granularity, HighPrecision, ScaleGrid};

/// The result of [`Quantizer::quantize_rows`].
pub(crate) struct QuantizedRows {
    pub(crate) quantized: Quantized,
    pub(crate) sums: Option<Tensor>,
    pub(crate) groups: Option<GroupCodes>,
}

impl Quantizer {
    /// [`Quantizer::quantize`] for a product over the columns, of a tensor of shape `dims` on the CPU whose rows `made` gives, and
    /// what is asked for beside it. None if one pass is not enough: if the scale depends on the tensor
    /// or there are several, if rounding is stochastic, or if a hook needs the tensor.
    pub(crate) fn quantize_rows<T: HighPrecision + Plain>(
        &self,
        dims: &[usize],
        beside: Beside<'_, T>,
        made: &impl MadeRows<T>,
    ) -> Result<Option<QuantizedRows>> {
        let Some((quantizer, scales)) = self.one_pass()? else {
            return Ok(None);
        };
        let _scope = enter(Kind::Cast);
        let (rows, cols) = matrix_dims(dims);
        let grid = ScaleGrid::tensorwise(rows, cols);
        let cast = quantizer.settled_cast();
        let result = encode_rows(&grid, applied_scale(&cast, &scales), &cast, beside, made)?;
        let amax = match quantizer.observers.training_recorder() {
            Some(_) => Some(Tensor::from_slice(&[result.amax], 1, &Device::Cpu)?),
            None => None,
        };
        let encoded = Encoded {
            codes: Codes {
                row_major: Some(result.codes.reshape(dims)?),
                transposed: None,
            },
            scales,
            amax,
            cast,
        };
        Ok(Some(QuantizedRows {
            quantized: quantizer.finish(encoded, dims, Contraction::Cols)?,
            sums: result.sums,
            groups: result.groups,
        }))
    }

    /// [`Quantizer::quantize_rows`], and [`group_codes`] of what the rows are made from, values of these sizes, in groups of `keep`
    /// features.
    pub(crate) fn quantize_and_keep<T: HighPrecision + Plain>(
        &self,
        dims: &[usize],
        made: &impl MadeRows<T>,
        (x, x_dims): (&[T], &[usize]),
        keep: Option<usize>,
    ) -> Result<Option<(Quantized, Option<Fp8Tensor>)>> {
        let grid = keep.map(|size| group_grid(x_dims, size));
        let groups = grid.as_ref().map(|grid| Groups { x, grid });
        let beside = Beside {
            sum_rows: None,
            groups,
        };
        let Some(cast) = self.quantize_rows(dims, beside, made)? else {
            return Ok(None);
        };
        let kept = keep.zip(cast.groups);
        let kept = kept.map(|(size, codes)| made_beside(codes, x_dims, size));
        Ok(Some((cast.quantized, kept.transpose()?)))
    }

    /// [`Quantizer::quantize_for`] over the columns of a matrix that a device computes as it casts it. None where
    /// [`Quantizer::quantize_rows`] gives none, and if the device has no kernel for it.
    pub(crate) fn quantize_made(&self, made: &Made<'_>, both: bool) -> Result<Option<Quantized>> {
        let cast = self.quantize_and_sum(made, both, None)?;
        Ok(cast.map(|(quantized, _)| quantized))
    }

    /// [`Quantizer::quantize_made`], and in `sum_rows` the sums over the rows before the cast.
    pub(crate) fn quantize_and_sum(
        &self,
        made: &Made<'_>,
        both: bool,
        sum_rows: Option<DType>,
    ) -> Result<Option<(Quantized, Option<Tensor>)>> {
        if let (Made::Stored(x), true) = (made, made.like().device().is_cpu()) {
            return for_dtype!("quantize", "the tensor", x.dtype(), T => {
                with_slices([x], |[values]: [&[T]; 1]| {
                    let beside = Beside { sum_rows, groups: None };
                    let cast = self.quantize_rows(x.dims(), beside, &Stored(values))?;
                    Ok(cast.map(|cast| (cast.quantized, cast.sums)))
                })?
            });
        }
        let (device, cast) = (made_casts(made.like().device()), self.settled_cast());
        let Some(device) = device.filter(|device| device.supports(made, &cast)) else {
            return Ok(None);
        };
        let Some((quantizer, scales)) = self.one_pass()? else {
            return Ok(None);
        };
        let _scope = enter(Kind::Cast);
        let orientation = backend(made.like().device())?.orientation(Contraction::Cols, both);
        let cast = quantizer.settled_cast();
        let measures = quantizer.observers.training_recorder().is_some();
        let scale = applied_scale(&cast, &scales);
        let result = device.cast(made, scale, &cast, orientation, measures, sum_rows)?;
        let encoded = Encoded {
            codes: result.codes,
            scales,
            amax: result.amax,
            cast,
        };
        let quantized = quantizer.finish(encoded, &made.dims(), Contraction::Cols)?;
        Ok(Some((quantized, result.sums)))
    }

    /// The cast to do now and its scales, if it needs to see each value only once.
    fn one_pass(&self) -> Result<Option<(Self, Scales)>> {
        let whole = self.spec.granularity == Granularity::Tensorwise;
        if !whole || self.spec.stochastic.is_some() || self.observers.hook.is_some() {
            return Ok(None);
        }
        let recorded = self.replay.as_ref().and_then(Replay::peek);
        let source = recorded.as_ref().map_or(&self.source, |cast| &cast.source);
        let Some(scales) = source.known_scales(self.spec.cast.format)? else {
            return Ok(None);
        };
        let quantizer = self.next_replayed().unwrap_or_else(|| self.clone());
        Ok(Some((quantizer, scales)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cast::kept::{KeptTensor, bytes_of_groups, group_codes};
    use crate::cast::spec::{CastHook, FirstScale, ScaleSource};
    use crate::cast::state::{AmaxRecorder, CalibrationRow, Role, Slot, StepCells};
    use crate::ops::{Activation, norm::Norm};
    use fp8_core::{Cast, DelayedRule, Format};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn wave(dims: &[usize], dtype: DType) -> Result<Tensor> {
        let count: usize = dims.iter().product();
        let values = (0..count).map(|i| ((i * 37 + 11) as f32 * 0.61).sin() * 3.);
        let x = Tensor::from_iter(values, &Device::Cpu)?.reshape(dims)?;
        Ok(x.to_dtype(dtype)?)
    }

    fn delayed() -> Result<(Quantizer, Slot)> {
        let slot = Slot::alone("fc", Role::Input, 1, &Device::Cpu)?;
        slot.restore(
            &Tensor::full(48f32, 1, &Device::Cpu)?,
            &Tensor::full(2f32, 1, &Device::Cpu)?,
        )?;
        let source = ScaleSource::Delayed {
            slot: slot.clone(),
            rule: DelayedRule::default(),
            first: FirstScale::OwnAmax,
        };
        let cast = Cast::new(Format::E4M3);
        Ok((Quantizer::new(cast, Granularity::Tensorwise, source), slot))
    }

    #[test]
    fn rows_cast_as_they_are_made_have_the_bits_of_the_tensor() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for dims in [
                vec![3, 8],
                vec![1, 5, 300],
                vec![2, 70, 128],
                vec![2, 10_000],
            ] {
                let x = wave(&dims, dtype)?;
                let gain = wave(&dims[dims.len() - 1..], dtype)?;
                let bias = (&gain * 0.3)?;
                for (case, keep) in (0..4).flat_map(|case| [(case, None), (case, Some(48))]) {
                    let (quantizer, slot) = delayed()?;
                    let step = StepCells::new(slot.table())?;
                    let counter = Arc::new(AtomicU64::new(0));
                    let quantizer = quantizer
                        .with_recorder(AmaxRecorder::new(step.clone(), 0, true))
                        .with_counter(counter.clone());
                    let activation = match case {
                        2 => Activation::Gelu,
                        _ => Activation::SwiGlu,
                    };
                    let shift = (case == 0).then_some(&bias);
                    let (got, y) = match case {
                        0 | 1 => {
                            let norm = Norm {
                                center: case == 0,
                                eps: 1e-5,
                            };
                            (
                                norm.cast_rows(&x, &gain, shift, (&quantizer, false), keep)?,
                                norm.detached(&x, &gain, shift)?,
                            )
                        }
                        _ => (
                            activation.cast_rows(&x, (&quantizer, false), keep)?,
                            activation.apply(&x)?,
                        ),
                    };
                    let at = format!("{dtype:?} {dims:?} {case} {keep:?}");
                    let Some((got, kept)) = got else {
                        panic!("not cast");
                    };
                    assert_eq!(kept.is_some(), keep.is_some());
                    if let (Some(kept), Some(size)) = (kept, keep) {
                        let alone = group_codes(&x, size)?;
                        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<u8>();
                        assert_eq!(flat(kept.codes())?, flat(alone.codes())?, "{at}");
                        let [ours, theirs] = [&kept, &alone].map(Fp8Tensor::dequant_scale);
                        assert_eq!(ours.to_vec2::<f32>()?, theirs.to_vec2::<f32>()?, "{at}");
                        assert_eq!(kept.dims(), alone.dims());
                        assert_eq!(kept.size_in_bytes(), bytes_of_groups(x.dims(), size));
                    }
                    let recorded = step.recorded()?.amax.to_vec1::<f32>()?;
                    assert_eq!(counter.load(Ordering::Relaxed), 1);
                    let expected = quantizer.quantize(&y, Contraction::Cols)?;
                    let bits = |q: &Quantized| q.tensor.codes().flatten_all()?.to_vec1::<u8>();
                    assert_eq!(bits(&got)?, bits(&expected)?, "{at}");
                    assert_eq!(got.tensor.dims(), expected.tensor.dims(), "{at}");
                    let amax = |q: &Quantized| -> Result<Vec<f32>> {
                        Ok(q.amax.as_ref().unwrap().to_vec1()?)
                    };
                    assert_eq!(amax(&got)?, amax(&expected)?, "{at}");
                    assert_eq!(recorded[0], amax(&expected)?[0], "{at}");
                }
            }
        }
        Ok(())
    }

    /// Gradients of activations and tensors that are there: codes, amaxes and sums over rows are those of separate passes.
    #[test]
    fn sums_beside_a_cast_are_those_of_a_pass_of_their_own() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for dims in [vec![3, 8], vec![2, 70, 128], vec![900, 96], vec![2, 10_000]] {
                let x = wave(&dims, dtype)?;
                for (activation, keep) in [
                    (None, None),
                    (Some(Activation::Gelu), None),
                    (Some(Activation::Gelu), Some(48)),
                    (Some(Activation::SwiGlu), None),
                    (Some(Activation::SwiGlu), Some(48)),
                ] {
                    let (quantizer, slot) = delayed()?;
                    let step = StepCells::new(slot.table())?;
                    let quantizer = quantizer.with_recorder(AmaxRecorder::new(step, 0, true));
                    let (got, values) = match activation {
                        None => {
                            let made = Made::Stored(&x);
                            let cast = quantizer.quantize_and_sum(&made, true, Some(DType::F32))?;
                            (cast, x.clone())
                        }
                        Some(activation) => {
                            let grad = wave(&activation.result_dims(&dims), dtype)?;
                            let (cast, sum) = ((&quantizer, true), Some(DType::F32));
                            let saved = match keep {
                                None => KeptTensor::Exact(x.clone()),
                                Some(size) => {
                                    KeptTensor::Codes(group_codes(&x, size)?, dims.clone(), dtype)
                                }
                            };
                            (
                                activation.cast_gradient(&saved, &grad, cast, sum)?,
                                activation.backward(&saved.get()?, &grad)?,
                            )
                        }
                    };
                    let Some((got, Some(sums))) = got else {
                        panic!("not cast");
                    };
                    let at = format!("{dtype:?} {dims:?} {activation:?}");
                    let expected = quantizer.quantize(&values, Contraction::Cols)?;
                    let bits = |q: &Quantized| q.tensor.codes().flatten_all()?.to_vec1::<u8>();
                    assert_eq!(bits(&got)?, bits(&expected)?, "{at}");
                    let amax = |q: &Quantized| -> Result<Vec<f32>> {
                        Ok(q.amax.as_ref().unwrap().to_vec1()?)
                    };
                    assert_eq!(amax(&got)?, amax(&expected)?, "{at}");
                    let matrix = values.reshape(matrix_dims(&dims))?;
                    let alone = backend(&Device::Cpu)?.sum_rows(&matrix, DType::F32)?;
                    assert_eq!(sums.to_vec1::<f32>()?, alone.to_vec1::<f32>()?, "{at}");
                }
            }
        }
        Ok(())
    }

    /// A scale of calibration divides; a product with its reciprocal would give another code.
    #[test]
    fn rows_with_a_static_scale_are_divided() -> Result<()> {
        let (value, scale) = (-0.79296875f32, 0.0068359375f32);
        let slot = Slot::alone("fc", Role::Input, 1, &Device::Cpu)?;
        let step = StepCells::new(slot.table())?;
        step.record(0, &Tensor::full(448. * scale, 1, &Device::Cpu)?, true)?;
        let row = CalibrationRow::new(0, Format::E4M3);
        let errors = slot.table().finish_calibration(&step, &[row], None)?;
        assert!(errors.is_empty());
        let cast = Cast::new(Format::E4M3);
        let source = ScaleSource::Static(slot);
        let quantizer = Quantizer::new(cast, Granularity::Tensorwise, source);
        let x = Tensor::full(value, (70, 300), &Device::Cpu)?;
        let whole = quantizer.quantize(&x, Contraction::Cols)?;
        let made = quantizer.quantize_made(&Made::Stored(&x), false)?;
        let made = made.expect("a known scale");
        let expected = cast.encode_divided(value, scale, 0);
        assert_ne!(expected, cast.encode_scaled(value, 1. / scale, 0));
        for quantized in [whole, made] {
            let codes = quantized.tensor.codes().flatten_all()?.to_vec1::<u8>()?;
            assert!(codes.iter().all(|code| *code == expected));
            assert!(quantized.cast.divides);
        }
        Ok(())
    }

    #[derive(Debug)]
    struct Sees;

    impl CastHook for Sees {
        fn on_cast(&self, _: &Tensor, _: &Quantized) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn casts_that_need_the_tensor_are_left_to_it() -> Result<()> {
        let (known, slot) = delayed()?;
        let fresh = Slot::alone("fc", Role::Input, 1, &Device::Cpu)?;
        let first = |first| ScaleSource::Delayed {
            slot: fresh.clone(),
            rule: DelayedRule::default(),
            first,
        };
        let fill = |start: usize, y: &mut [f32]| {
            for (i, y) in y.iter_mut().enumerate() {
                *y = (start + i) as f32;
            }
        };
        let casts = |quantizer: &Quantizer| -> Result<bool> {
            let alone = Beside {
                sum_rows: None,
                groups: None,
            };
            Ok(quantizer.quantize_rows(&[3, 4], alone, &fill)?.is_some())
        };
        let with = |source| known.clone().with_source(source);
        assert!(casts(&known)? && casts(&with(first(FirstScale::One)))?);
        assert!(!casts(&with(first(FirstScale::OwnAmax)))?);
        assert!(!casts(
            &known.clone().with_granularity(Granularity::Rowwise)
        )?);
        let hook: Arc<dyn CastHook> = Arc::new(Sees);
        assert!(!casts(&known.clone().with_hook(hook))?);
        assert!(!casts(&known.clone().with_stochastic(slot, 1))?);
        assert!(!casts(&Quantizer::dynamic(
            Format::E4M3,
            Granularity::Tensorwise
        ))?);
        Ok(())
    }
}
