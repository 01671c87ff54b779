//! The dtypes of parameters, moments and masters in host memory, and how f32 results are rounded to them.

use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, bail};
use fp8_core::{HighPrecision, StochasticKey, stochastic_round};
use half::{bf16, f16};

/// Elements of a moment or a master.
pub enum HostValues {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// Calls `$f` with the elements, whatever their type.
macro_rules! each {
    ($values:expr, $elements:ident => $body:expr) => {
        match $values {
            HostValues::F32($elements) => $body,
            HostValues::Bf16($elements) => $body,
            HostValues::F16($elements) => $body,
        }
    };
}

impl HostValues {
    /// Zeros of f32, bf16 or f16.
    pub(crate) fn zeros(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::F16 => Self::F16(vec![f16::ZERO; len]),
            DType::BF16 => Self::Bf16(vec![bf16::ZERO; len]),
            _ => Self::F32(vec![0.0; len]),
        }
    }

    /// A copy of a tensor of f32, bf16 or f16.
    pub(crate) fn from_tensor(tensor: &Tensor) -> Result<Self> {
        let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
        match tensor.dtype() {
            DType::BF16 => flat.to_vec1().map(Self::Bf16),
            DType::F16 => flat.to_vec1().map(Self::F16),
            _ => flat.to_vec1().map(Self::F32),
        }
    }

    pub(crate) fn to_tensor(&self, shape: &Shape) -> Result<Tensor> {
        each!(self, values => Tensor::from_slice(values, shape, &Device::Cpu))
    }

    pub(crate) fn len(&self) -> usize {
        each!(self, values => values.len())
    }

    /// The largest magnitude.
    pub(crate) fn amax(&self) -> f32 {
        each!(self, values => amax(values))
    }
}

fn amax<T: Value>(values: &[T]) -> f32 {
    T::of_magnitude(T::largest(values))
}

/// The largest magnitude of a tensor of f32, bf16 or f16.
pub(crate) fn amax_of_tensor(tensor: &Tensor) -> Result<f32> {
    let flat = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = flat.storage_and_layout();
    let (Storage::Cpu(cpu), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("amax: expected a contiguous tensor on the CPU")
    };
    Ok(match cpu {
        CpuStorage::F16(values) => amax(&values[start..end]),
        CpuStorage::BF16(values) => amax(&values[start..end]),
        CpuStorage::F32(values) => amax(&values[start..end]),
        _ => bail!("amax: {:?} is not a dtype of parameters", flat.dtype()),
    })
}

/// An element type that is updated in f32.
pub(crate) trait Value: Copy + Default + Send + Sync {
    /// The largest finite number.
    const LARGEST: f32;

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn of_values(values: &mut HostValues) -> Option<&mut [Self]>;

    fn widen(self) -> f32;
    /// Rounds to nearest.
    fn narrow(x: f32) -> Self;
    fn same_bits(self, other: Self) -> bool;

    /// The values in f32: themselves, or copied to `scratch`, which is as long.
    fn widened<'a>(values: &'a mut [Self], scratch: &'a mut [f32]) -> &'a mut [f32];

    /// Rounds the results, which are where [`Value::widened`] has put them. With a key at random, else to nearest. Values beyond the
    /// range become its largest number, but without a key only if `saturate`.
    fn put_back(
        values: &mut [Self],
        scratch: &[f32],
        first: u64,
        key: Option<StochasticKey>,
        saturate: bool,
    );

    /// Rounds `wide` to nearest, or at random with a key; elements are numbered from `first` on.
    fn round(wide: &[f32], out: &mut [Self], first: u64, key: Option<StochasticKey>);

    /// Bits of the magnitude, which rise with it.
    fn magnitude(self) -> u32;
    /// The number with these bits of [`Value::magnitude`].
    fn of_magnitude(bits: u32) -> f32;

    /// The bits of the largest magnitude.
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

    fn of_values(values: &mut HostValues) -> Option<&mut [Self]> {
        match values {
            HostValues::F32(values) => Some(values),
            _ => None,
        }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn same_bits(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }

    fn widened<'a>(values: &'a mut [Self], _: &'a mut [f32]) -> &'a mut [f32] {
        values
    }

    fn put_back(
        values: &mut [Self],
        _: &[f32],
        _: u64,
        key: Option<StochasticKey>,
        saturate: bool,
    ) {
        if saturate && key.is_none() {
            for x in values {
                *x = x.clamp(-f32::MAX, f32::MAX);
            }
        }
    }

    fn round(wide: &[f32], out: &mut [Self], _: u64, _: Option<StochasticKey>) {
        out.copy_from_slice(wide);
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
    ($type:ident, $storage:ident, $values:ident) => {
        impl Value for $type {
            const LARGEST: f32 = <$type>::MAX.to_f32_const();

            fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$storage(values) => Some(values),
                    _ => None,
                }
            }

            fn of_values(values: &mut HostValues) -> Option<&mut [Self]> {
                match values {
                    HostValues::$values(values) => Some(values),
                    _ => None,
                }
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                HighPrecision::to_f32(self)
            }

            #[inline(always)]
            fn narrow(x: f32) -> Self {
                HighPrecision::from_f32(x)
            }

            #[inline(always)]
            fn same_bits(self, other: Self) -> bool {
                self.to_bits() == other.to_bits()
            }

            fn widened<'a>(values: &'a mut [Self], scratch: &'a mut [f32]) -> &'a mut [f32] {
                fp8_core::widen(values, scratch);
                scratch
            }

            fn put_back(
                values: &mut [Self],
                scratch: &[f32],
                first: u64,
                key: Option<StochasticKey>,
                saturate: bool,
            ) {
                Self::round(scratch, values, first, key);
                if !saturate || key.is_some() {
                    return;
                }
                for (out, wide) in values.iter_mut().zip(scratch) {
                    if out.is_infinite() {
                        *out = if *wide < 0. {
                            <$type>::MIN
                        } else {
                            <$type>::MAX
                        };
                    }
                }
            }

            fn round(wide: &[f32], out: &mut [Self], first: u64, key: Option<StochasticKey>) {
                let Some(key) = key else {
                    return HighPrecision::narrow(wide, out);
                };
                stochastic_round(key, first, wide, out);
                // Rarely needed: the search vectorizes.
                let beyond = |found, x: &f32| found | (x.abs() > Self::LARGEST);
                if !wide.iter().fold(false, beyond) {
                    return;
                }
                for (out, wide) in out.iter_mut().zip(wide) {
                    if out.is_infinite() && wide.is_finite() {
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
