//! Casts of one part of a tensor whose other parts other ranks cast: together they are the codes of the whole, bit for bit.

use crate::base::error::{Result, internal};
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::{ScaleSource, applied_scale};
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::{Codes, CurrentScale, backend};
use candle_core::{DType, Tensor};
use fp8_core::{Contraction, Granularity, ScaleGrid};

impl Quantizer {
    /// Whether parts of a tensor can be cast apart: all elements share a scale, rounding is not stochastic (random bits go by the place in
    /// the tensor), and no hook wants to see the whole.
    pub fn casts_parts(&self) -> bool {
        let whole = self.spec.granularity == Granularity::Tensorwise;
        whole && self.spec.stochastic.is_none() && self.observers.hook.is_none()
    }

    /// Whether scales are made from the amax of the tensor that is cast.
    pub fn needs_amax(&self) -> bool {
        matches!(self.source, ScaleSource::Current { .. })
    }

    /// Casts some elements of a tensor, perhaps none, with the scale of the whole. `whole_amax` gives the amax of the whole, f32 with one
    /// element, and is called if the scale is made from it. The amax of the part is recorded: where a step takes the maximum over ranks,
    /// that is the amax of the whole.
    ///
    /// # Errors
    /// As [`Quantizer::quantize`], and those of `whole_amax`. An internal error if not [`Quantizer::casts_parts`].
    pub fn quantize_part(
        &self,
        part: &Tensor,
        whole_amax: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Quantized> {
        if !self.casts_parts() {
            internal!("a cast of a part with {}", self.spec.granularity);
        }
        if let Some(recorded) = self.next_replayed() {
            return recorded.quantize_part(part, whole_amax);
        }
        let (cast, backend) = (self.settled_cast(), backend(part.device())?);
        let part = part.detach().flatten_all()?.contiguous()?;
        let scales = match (&self.source, self.source.known_scales(cast.format)?) {
            (_, Some(scales)) => scales,
            (ScaleSource::Delayed { slot, rule, .. }, None) => {
                slot.made_scale(&whole_amax()?.reshape(1)?, cast.format, rule)?
            }
            (
                ScaleSource::Current {
                    policy,
                    power_of_two,
                },
                None,
            ) => {
                let amax = whole_amax()?.reshape((1, 1))?;
                let amax = match self.spec.amax_bound {
                    Some(bound) => amax.minimum(f64::from(bound))?,
                    None => amax,
                };
                let current = CurrentScale {
                    policy: *policy,
                    power_of_two: *power_of_two,
                };
                backend.scales(&amax, cast.format, current)?
            }
            (ScaleSource::Unscaled, None) => {
                let one = Tensor::ones(1, DType::F32, part.device())?;
                (one.clone(), one)
            }
            (ScaleSource::Fixed { dequant_scale }, None) => {
                let dequant_scale = dequant_scale.to_device(part.device())?;
                (backend.reciprocal(&dequant_scale)?, dequant_scale)
            }
            (ScaleSource::Static(_) | ScaleSource::Known { .. }, None) => {
                internal!("a cast without scales")
            }
        };
        let scale = applied_scale(&cast, &scales);
        let measures = self.observers.training_recorder().is_some();
        let (codes, amax) = match part.elem_count() {
            0 => {
                let nothing = Tensor::zeros(1, DType::F32, part.device())?;
                let codes = Tensor::zeros(0, DType::U8, part.device())?;
                (Codes::row_major(codes), measures.then_some(nothing))
            }
            count => {
                let grid = ScaleGrid::tensorwise(1, count);
                let orientation = backend.orientation(Contraction::Cols, false);
                match measures {
                    true => {
                        let cast = backend.quantize_with_amax(&part, scale, &cast, orientation);
                        cast.map(|(codes, amax)| (codes, Some(amax)))?
                    }
                    false => {
                        let codes = backend.quantize(&part, &grid, scale, &cast, orientation)?;
                        (codes, None)
                    }
                }
            }
        };
        let (quant_scale, dequant_scale) = scales;
        let delayed = matches!(self.source, ScaleSource::Delayed { .. });
        self.observers.count_and_record(amax.as_ref(), delayed)?;
        let scheme = (self.spec.granularity, Contraction::Cols);
        let known = ScaleSource::Known {
            quant_scale: quant_scale.force_contiguous()?,
            dequant_scale: dequant_scale.force_contiguous()?,
        };
        let quantized = Quantized {
            tensor: Fp8Tensor::from_codes(codes, part.dims(), cast.format, scheme, dequant_scale)?,
            quant_scale,
            amax,
            cast,
        };
        if let Some(replay) = &self.replay {
            replay.record(&self.spec, &known, &quantized)?;
        }
        Ok(quantized)
    }
}

impl Quantized {
    /// The whole of which this is a part: `codes` are those of all parts, U8 in row-major order of `dims`.
    ///
    /// # Errors
    /// If there are not as many codes as `dims` say.
    pub fn whole(&self, codes: &Tensor, dims: &[usize], contraction: Contraction) -> Result<Self> {
        let codes = Codes::row_major(codes.detach().reshape(dims)?.contiguous()?);
        let scheme = (self.tensor.granularity(), contraction);
        let scale = self.tensor.dequant_scale().clone();
        let format = self.tensor.format();
        Ok(Self {
            tensor: Fp8Tensor::from_codes(codes, dims, format, scheme, scale)?,
            quant_scale: self.quant_scale.clone(),
            amax: None,
            cast: self.cast,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use fp8_core::Format;

    #[test]
    fn parts_have_the_codes_of_the_whole() -> Result<()> {
        let values: Vec<f32> = (0..6 * 50)
            .map(|i| (i as f32 * 0.7).sin() * i as f32)
            .collect();
        let x = Tensor::from_vec(values, (6, 50), &Device::Cpu)?;
        let grid = ScaleGrid::tensorwise(6, 50);
        let amax = backend(x.device())?.amax(&x, &grid)?;
        for power_of_two in [false, true] {
            for bound in [None, Some(100.)] {
                let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise)
                    .with_power_of_two(power_of_two)
                    .with_amax_bound(bound);
                let expected = quantizer.quantize(&x, Contraction::Rows)?;
                let flat = x.flatten_all()?;
                let mut codes = vec![];
                let mut last = None;
                for (begin, len) in [(0, 130), (130, 0), (130, 170)] {
                    let part = flat.narrow(0, begin, len)?;
                    let part = quantizer.quantize_part(&part, || Ok(amax.clone()))?;
                    codes.push(part.tensor.codes().clone());
                    last = Some(part);
                }
                codes.retain(|codes| codes.elem_count() > 0);
                let codes = Tensor::cat(&codes, 0)?;
                let Some(last) = last else { panic!("no part") };
                let got = last.whole(&codes, &[6, 50], Contraction::Rows)?;
                let bits = |q: &Quantized| q.tensor.codes().to_vec2::<u8>();
                assert_eq!(bits(&got)?, bits(&expected)?);
                let scales = |q: &Quantized| -> Result<_> {
                    let dequant_scale = q.tensor.dequant_scale().flatten_all()?.to_vec1::<f32>()?;
                    Ok((
                        dequant_scale,
                        q.quant_scale.flatten_all()?.to_vec1::<f32>()?,
                    ))
                };
                assert_eq!(scales(&got)?, scales(&expected)?);
            }
        }
        let rowwise = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
        assert!(!rowwise.casts_parts());
        let error = rowwise.quantize_part(&x, || Ok(amax)).map(drop);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("a part with rowwise"), "{error}");
        Ok(())
    }
}
