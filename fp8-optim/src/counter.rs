//! The number of steps taken, and what follows from it.

use candle_core::Result;
#[cfg(feature = "cuda")]
use candle_core::{Device, Tensor};

/// Steps taken, skipped ones not counted.
pub(super) enum Counter {
    /// Counted on the host.
    Host(u64),
    /// i64 `[1]` on the CUDA device of all variables: only the device knows which steps it skipped.
    #[cfg(feature = "cuda")]
    Device(Tensor),
}

impl Counter {
    /// A counter at 0 on this CUDA device.
    #[cfg(feature = "cuda")]
    pub(super) fn on(device: &Device) -> Result<Self> {
        Tensor::zeros(1, candle_core::DType::I64, device).map(Counter::Device)
    }

    pub(super) fn get(&self) -> Result<u64> {
        match self {
            Counter::Host(step) => Ok(*step),
            #[cfg(feature = "cuda")]
            Counter::Device(tensor) => {
                let step = tensor.to_vec1::<i64>()?[0];
                u64::try_from(step).map_err(|_| {
                    candle_core::Error::msg(format!("the step counter of a device is {step}"))
                })
            }
        }
    }

    /// The count if the host knows it, else 0.
    pub(super) fn on_host(&self) -> u64 {
        match self {
            Counter::Host(step) => *step,
            #[cfg(feature = "cuda")]
            Counter::Device(_) => 0,
        }
    }

    pub(super) fn set(&mut self, step: u64) -> Result<()> {
        match self {
            Counter::Host(own) => *own = step,
            #[cfg(feature = "cuda")]
            Counter::Device(tensor) => {
                let step = i64::try_from(step).unwrap_or(i64::MAX);
                *tensor = Tensor::new(&[step], tensor.device())?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Counter::Host(step) => write!(f, "{step}"),
            // Not worth waiting for the device.
            #[cfg(feature = "cuda")]
            Counter::Device(_) => write!(f, "on the device"),
        }
    }
}

/// `1 / (1 - beta^step)`.
pub(super) fn correction(beta: f64, step: u64) -> f64 {
    1.0 / (1.0 - power(beta, step))
}

/// By squaring, in the order of operations of the CUDA kernel; `f64::powi` specifies none.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    loop {
        if exponent & 1 == 1 {
            result *= base;
        }
        exponent >>= 1;
        if exponent == 0 {
            return result;
        }
        base *= base;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn powers() {
        for beta in [0.0, 0.5, 0.9, 0.999] {
            for step in [0, 1, 2, 3, 10, 1000] {
                let expected = f64::powf(beta, step as f64);
                let got = super::power(beta, step);
                assert!((got - expected).abs() <= 1e-12 * expected, "{beta}^{step}");
            }
            assert_eq!(super::power(beta, u64::MAX), 0.0);
        }
    }
}
