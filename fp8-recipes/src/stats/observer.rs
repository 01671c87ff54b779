//! Calling statistics and the user's functions for every cast.

use super::cast_stats::CastStats;
use crate::config::Operand;
use candle_core::Tensor;
use fp8_candle::{CastHook, Fp8Tensor, Quantized};
use fp8_core::Cast;
use std::fmt;
use std::sync::Arc;

/// One cast of a layer.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CastEvent<'a> {
    /// Path of the layer.
    pub path: &'a str,
    /// Which of its tensors, and for which use.
    pub operand: Operand,
    /// Format, overflow and rounding; stochastic rounding with its key.
    pub cast: Cast,
    /// The values before the cast.
    pub values: &'a Tensor,
    /// Codes and dequant_scale.
    pub quantized: &'a Fp8Tensor,
}

/// A function that is called for the casts of the layers inside a guard: [`Autocast::with_cast_observer`](crate::Autocast).
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{Autocast, CastObserver, PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
/// # use std::sync::{Arc, Mutex};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let x = Tensor::randn(0f32, 1., (4, 32), &Device::Cpu)?;
/// # let layer = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// # prepare_fp8(&layer, &PrepareOptions::default())?;
/// let seen = Arc::new(Mutex::new(vec![]));
/// let list = seen.clone();
/// let observer = CastObserver::new(move |event| {
///     let mut list = list.lock().unwrap();
///     list.push(format!("{} {} {}", event.path, event.operand, event.cast.format));
/// });
/// let autocast = Autocast::new(RecipeName::Direct).with_cast_observer(&observer);
/// with_fp8(autocast, || layer.forward(&x))?;
/// assert_eq!(*seen.lock().unwrap(), ["fc input e5m2", "fc weight e5m2", "fc output e5m2"]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct CastObserver(Arc<Observe>);

type Observe = dyn Fn(&CastEvent<'_>) + Send + Sync;

impl CastObserver {
    /// `observe` is called for each cast in forward and backward passes, on the thread of the cast.
    pub fn new(observe: impl Fn(&CastEvent<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observe))
    }
}

impl fmt::Debug for CastObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CastObserver")
    }
}

/// The observers of one tensor of a layer.
#[derive(Debug)]
struct TensorObservers {
    path: Arc<str>,
    operand: Operand,
    stats: Option<CastStats>,
    observer: Option<CastObserver>,
}

impl CastHook for TensorObservers {
    fn on_cast(&self, x: &Tensor, quantized: &Quantized) -> fp8_candle::Result<()> {
        if let Some(CastObserver(observe)) = &self.observer {
            observe(&CastEvent {
                path: &self.path,
                operand: self.operand,
                cast: quantized.cast,
                values: x,
                quantized: &quantized.tensor,
            });
        }
        match &self.stats {
            Some(stats) => stats.measure(&self.path, self.operand, x, quantized),
            None => Ok(()),
        }
    }
}

/// The hook of a layer's operand; None without statistics and observer.
pub(crate) fn hook(
    path: &Arc<str>,
    operand: Operand,
    stats: Option<&CastStats>,
    observer: Option<&CastObserver>,
) -> Option<Arc<dyn CastHook>> {
    if stats.is_none() && observer.is_none() {
        return None;
    }
    Some(Arc::new(TensorObservers {
        path: path.clone(),
        operand,
        stats: stats.cloned(),
        observer: observer.cloned(),
    }))
}
