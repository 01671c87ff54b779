//! The dtypes of parameters and moments.

use super::super::elements::Element;
use super::super::masters::HostMaster;
use candle_core::{CpuStorage, DType, Device, Result, Tensor};
use fp8_core::{HighPrecision, StochasticKey};
use half::{bf16, f16};

/// An element type of parameters and moments.
pub(super) trait Value: Element {
    const LARGEST: f32;

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn of_moment(moment: &mut HostMaster) -> Option<&mut [Self]>;

    fn widen_all(values: &[Self], wide: &mut [f32]);

    /// Rounds to nearest, what is beyond the range to its end.
    fn nearest(wide: &[f32], out: &mut [Self]);

    /// Bits of the magnitude, which rise with it.
    fn magnitude(self) -> u32;

    /// The number of [`Value::magnitude`].
    fn of_magnitude(bits: u32) -> f32;

    /// Rounds; at random with a key, elements numbered from `first` on.
    fn round(key: Option<StochasticKey>, first: u64, wide: &[f32], out: &mut [Self]) {
        match key {
            None => Self::nearest(wide, out),
            Some(key) => Self::stochastic(key, first, wide, out),
        }
    }

    /// Bits of the largest magnitude.
    #[inline(always)]
    fn largest(values: &[Self]) -> u32 {
        values.iter().fold(0, |max, x| max.max(x.magnitude()))
    }
}

impl Value for f32 {
    const LARGEST: f32 = f32::MAX;

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }

    fn of_moment(moment: &mut HostMaster) -> Option<&mut [Self]> {
        match moment {
            HostMaster::F32(values) => Some(values),
            _ => None,
        }
    }

    fn widen_all(values: &[Self], wide: &mut [f32]) {
        wide.copy_from_slice(values);
    }

    fn nearest(wide: &[f32], out: &mut [Self]) {
        for (out, wide) in out.iter_mut().zip(wide) {
            *out = wide.clamp(-f32::MAX, f32::MAX);
        }
    }

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & 0x7FFF_FFFF
    }

    fn of_magnitude(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
}

macro_rules! half {
    ($type:ident, $variant:ident, $moment:ident) => {
        impl Value for $type {
            const LARGEST: f32 = <$type>::MAX.to_f32_const();

            fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }

            fn of_moment(moment: &mut HostMaster) -> Option<&mut [Self]> {
                match moment {
                    HostMaster::$moment(values) => Some(values),
                    _ => None,
                }
            }

            fn widen_all(values: &[Self], wide: &mut [f32]) {
                fp8_core::widen(values, wide);
            }

            fn nearest(wide: &[f32], out: &mut [Self]) {
                HighPrecision::narrow(wide, out);
                for (out, wide) in out.iter_mut().zip(wide) {
                    if out.is_infinite() {
                        *out = if *wide < 0. {
                            <$type>::MIN
                        } else {
                            <$type>::MAX
                        };
                    }
                }
            }

            #[inline(always)]
            fn magnitude(self) -> u32 {
                u32::from(self.to_bits() & 0x7FFF)
            }

            fn of_magnitude(bits: u32) -> f32 {
                <$type>::from_bits(bits as u16).to_f32()
            }
        }
    };
}
half!(f16, F16, F16);
half!(bf16, BF16, Bf16);

/// Zeros of a dtype that parameters have.
pub(super) fn zeros(dtype: DType, len: usize) -> HostMaster {
    match dtype {
        DType::F16 => HostMaster::F16(vec![f16::ZERO; len]),
        DType::BF16 => HostMaster::Bf16(vec![bf16::ZERO; len]),
        _ => HostMaster::F32(vec![0.0; len]),
    }
}

/// The largest magnitude of a tensor of the CPU.
pub(super) fn amax_of(tensor: &Tensor) -> Result<f32> {
    let flat = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = flat.storage_and_layout();
    let (candle_core::Storage::Cpu(cpu), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    else {
        candle_core::bail!("amax: expected a contiguous tensor on the CPU")
    };
    Ok(match cpu {
        CpuStorage::F16(values) => f16::of_magnitude(f16::largest(&values[start..end])),
        CpuStorage::BF16(values) => bf16::of_magnitude(bf16::largest(&values[start..end])),
        CpuStorage::F32(values) => f32::of_magnitude(f32::largest(&values[start..end])),
        _ => candle_core::bail!("amax: {:?} is no dtype of parameters", flat.dtype()),
    })
}

pub(super) fn amax_of_moment(moment: &HostMaster) -> f32 {
    match moment {
        HostMaster::F16(values) => f16::of_magnitude(f16::largest(values)),
        HostMaster::Bf16(values) => bf16::of_magnitude(bf16::largest(values)),
        HostMaster::F32(values) => f32::of_magnitude(f32::largest(values)),
    }
}
