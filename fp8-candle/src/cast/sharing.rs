//! When two casts give the same codes, so that one of them serves both.

use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::replay::Replay;
use crate::cast::spec::ScaleSource;
use crate::cast::tensor::Quantized;
use candle_core::Tensor;

impl Quantizer {
    /// Whether both give the same codes for one tensor: the same specification, and the same source of scales.
    pub(crate) fn is_same_cast(&self, other: &Self) -> bool {
        self.spec == other.spec && self.source == other.source
    }

    /// Whether the codes made by this cast are what `other` would make for the other contraction.
    pub(crate) fn serves(&self, other: &Self) -> bool {
        self.spec.is_symmetric() && self.is_same_cast(other)
    }

    /// Whether this cast would give the same codes as `quantized`, which `other` has made from the same tensor, as far as
    /// that is known without waiting for a device.
    pub(crate) fn gives_the_codes_of(&self, other: &Self, quantized: &Quantized) -> Result<bool> {
        if self.spec != other.spec || self.spec.stochastic.is_some() {
            return Ok(false);
        }
        let from_rows = matches!(
            (&self.source, &other.source),
            (ScaleSource::Delayed { .. }, ScaleSource::Delayed { .. })
                | (ScaleSource::Static(_), ScaleSource::Static(_))
        );
        if !from_rows {
            return Ok(self.source == other.source);
        }
        let recorded = self.replay.as_ref().and_then(Replay::peek);
        let source = recorded.as_ref().map_or(&self.source, |cast| &cast.source);
        let Some((quant_scale, dequant_scale)) = source.known_scales(self.spec.cast.format)? else {
            return Ok(false);
        };
        if !quant_scale.device().is_cpu() {
            return Ok(self.source == other.source);
        }
        let bits = |scale: &Tensor| -> Result<Vec<u32>> {
            let values = scale.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        // Two dequant_scales may have one reciprocal.
        Ok(bits(&quant_scale)? == bits(&quantized.quant_scale)?
            && bits(&dequant_scale)? == bits(quantized.tensor.dequant_scale())?)
    }

    /// Counts, records and shows a cast of `x` that another quantizer, which gives the same codes, has done.
    pub(crate) fn note_shared<'a>(
        &self,
        x: impl FnOnce() -> Result<&'a Tensor>,
        quantized: &Quantized,
    ) -> Result<()> {
        if let Some(replay) = &self.replay {
            if replay.next().is_some() {
                return Ok(());
            }
            replay.record(&self.spec, &self.source, quantized)?;
        }
        self.observers
            .count_and_record(quantized.amax.as_ref(), self.source.is_delayed())?;
        match &self.observers.hook {
            None => Ok(()),
            Some(hook) => hook.on_cast(x()?, quantized),
        }
    }
}
