//! One cast for several products that read the same tensor.

use super::{Quantized, Quantizer, scales_of};
use crate::base::error::Result;
use crate::cast::recall::Recall;
use crate::cast::same::same_cast;
use crate::cast::scale_source::{FirstScale, ScaleSource};
use candle_core::Tensor;
use std::sync::atomic::Ordering;

impl Quantizer {
    /// Whether this cast of the tensor of which `other` made `quantized` would give the same codes, as far as that can be told
    /// without waiting for a device.
    pub(crate) fn gives_the_codes_of(&self, other: &Self, quantized: &Quantized) -> Result<bool> {
        let alike = self.cast == other.cast
            && self.granularity == other.granularity
            && self.stochastic.is_none()
            && other.stochastic.is_none()
            && self.amax_bound == other.amax_bound;
        if !alike {
            return Ok(false);
        }
        let noted = scales_of(&self.recall.as_ref().and_then(Recall::peek));
        let noted = noted.map(|(quant_scale, _)| quant_scale);
        let scale = match (&self.source, &other.source, noted) {
            (ScaleSource::Delayed { .. }, ScaleSource::Delayed { .. }, Some(scale))
            | (ScaleSource::Static(_), ScaleSource::Static(_), Some(scale)) => scale,
            (ScaleSource::Delayed { slot, rule, first }, ScaleSource::Delayed { .. }, None) => {
                if *first == FirstScale::OwnAmax && slot.is_initial()? {
                    return Ok(false);
                }
                slot.delayed_scale(self.cast.format, rule)?.0
            }
            (ScaleSource::Static(slot), ScaleSource::Static(_), None) => {
                slot.static_scale(self.cast.format)?.0
            }
            _ => return Ok(same_cast(self, other)),
        };
        if !scale.device().is_cpu() {
            return Ok(same_cast(self, other));
        }
        let bits = |scale: &Tensor| -> Result<Vec<u32>> {
            let values = scale.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        Ok(bits(&scale)? == bits(&quantized.quant_scale)?)
    }

    /// Whether its scales come from a table, which has others later.
    pub(super) fn has_scales_of_table(&self) -> bool {
        matches!(
            self.source,
            ScaleSource::Delayed { .. } | ScaleSource::Static(_)
        )
    }

    /// Counts and records a cast of `x` that another one, which gives the same codes, has done.
    pub(crate) fn note_shared<'a>(
        &self,
        x: impl FnOnce() -> Result<&'a Tensor>,
        quantized: &Quantized,
    ) -> Result<()> {
        if let Some(recall) = &self.recall {
            if recall.next().is_some() {
                return Ok(());
            }
            recall.note(quantized, self.has_scales_of_table())?;
        }
        if let Some(counter) = &self.counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(observer) = &self.observer {
            let makes_scales = matches!(self.source, ScaleSource::Delayed { .. });
            observer.note(quantized.amax.as_ref(), makes_scales)?;
        }
        match &self.hook {
            None => Ok(()),
            Some(hook) => hook.on_cast(x()?, quantized),
        }
    }
}
