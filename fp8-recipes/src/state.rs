//! FP8 state of one layer.

use candle_core::{Device, Result};
use fp8_candle::{CastCounter, DelayedSlot, WeightCache};
use fp8_core::Format;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How a calibrated layer is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportStrategy {
    /// One static scale for the weight and one for the input (delayed, tensorwise, static recipes).
    Tensor,
    /// One scale per output channel of the weight, inputs scaled per token while they run (rowwise recipes).
    Channel,
}

/// What [`crate::prepare_fp8`] gives to a layer: scales and histories of its three tensors, its cached FP8 weight and
/// its counters. Clones of the layer share it.
#[derive(Debug)]
pub struct Fp8State {
    path: Arc<str>,
    input: Arc<DelayedSlot>,
    weight: Arc<DelayedSlot>,
    grad_output: Arc<DelayedSlot>,
    pub(crate) cache: WeightCache,
    casts: CastCounter,
    /// Strategy and format of the inputs.
    calibrated_as: Mutex<Option<(ExportStrategy, Format)>>,
}

impl Fp8State {
    /// Fresh state: quant_scales 1, histories of `amax_history_len` zeros.
    pub(crate) fn new(path: Arc<str>, amax_history_len: usize, device: &Device) -> Result<Self> {
        let slot = |role: &str| {
            DelayedSlot::new(format!("{path}.{role}"), amax_history_len, device).map(Arc::new)
        };
        Ok(Self {
            input: slot("input")?,
            weight: slot("weight")?,
            grad_output: slot("grad_output")?,
            path,
            cache: WeightCache::default(),
            casts: Arc::new(AtomicU64::new(0)),
            calibrated_as: Mutex::new(None),
        })
    }

    /// Path of the layer.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Slot of the input.
    pub fn input(&self) -> &Arc<DelayedSlot> {
        &self.input
    }

    /// Slot of the weight.
    pub fn weight(&self) -> &Arc<DelayedSlot> {
        &self.weight
    }

    /// Slot of the gradient of the output.
    pub fn grad_output(&self) -> &Arc<DelayedSlot> {
        &self.grad_output
    }

    /// The three slots with the names they have in a checkpoint.
    pub fn slots(&self) -> [(&'static str, &Arc<DelayedSlot>); 3] {
        [
            ("input", &self.input),
            ("weight", &self.weight),
            ("grad_output", &self.grad_output),
        ]
    }

    /// How many tensors this layer has cast to FP8, forward and backward; a cached weight counts once.
    pub fn quantized_tensors(&self) -> u64 {
        self.casts.load(Ordering::Relaxed)
    }

    pub(crate) fn counter(&self) -> &CastCounter {
        &self.casts
    }

    /// How the layer was calibrated, if it was.
    pub fn calibrated_as(&self) -> Option<ExportStrategy> {
        self.calibration().map(|(strategy, _)| strategy)
    }

    /// How the layer was calibrated and in which format its inputs are cast.
    pub(crate) fn calibration(&self) -> Option<(ExportStrategy, Format)> {
        *self
            .calibrated_as
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_calibrated_as(&self, calibration: Option<(ExportStrategy, Format)>) {
        *self
            .calibrated_as
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = calibration;
    }
}
