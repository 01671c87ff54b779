//! The dtypes of parameters, moments and masters in host memory, and how f32 results are rounded to them.

use candle_core::CpuStorage;
use fp8_core::{HighPrecision, StochasticKey, stochastic_round};
use half::{bf16, f16};

/// An element type that is updated in f32.
pub(crate) trait Value: HighPrecision {
    /// The largest finite number.
    const LARGEST: f32;
    /// The bits of a magnitude: all but the sign. They rise with the magnitude.
    const MAGNITUDE: u32;

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn bits(self) -> u32;
    fn of_bits(bits: u32) -> Self;

    /// Rounds at random; f32 needs no rounding. Elements are numbered from `first` on.
    fn round_at_random(key: StochasticKey, first: u64, wide: &[f32], out: &mut [Self]);

    /// The values in f32: themselves, or copied to `scratch`, which is as long.
    fn widened<'a>(values: &'a mut [Self], scratch: &'a mut [f32]) -> &'a mut [f32] {
        fp8_core::widen(values, scratch);
        scratch
    }

    /// The results, where [`Value::widened`] has put them.
    fn results<'a>(_: &'a [Self], scratch: &'a [f32]) -> &'a [f32] {
        scratch
    }

    /// Rounds the results: at random with a key, else to nearest. Values beyond the range become its largest number, but without a key
    /// only if `saturate`.
    fn put_back(
        values: &mut [Self],
        scratch: &[f32],
        first: u64,
        key: Option<StochasticKey>,
        saturate: bool,
    ) {
        Self::round(scratch, values, first, key);
        if saturate && key.is_none() {
            replace_infinities(scratch, values, |_| true);
        }
    }

    /// Rounds `wide` to nearest, or at random with a key; elements are numbered from `first` on.
    fn round(wide: &[f32], out: &mut [Self], first: u64, key: Option<StochasticKey>) {
        match key {
            None => Self::narrow(wide, out),
            Some(key) => {
                Self::round_at_random(key, first, wide, out);
                replace_infinities(wide, out, f32::is_finite);
            }
        }
    }

    /// The bits of the largest magnitude.
    #[inline(always)]
    fn largest(values: &[Self]) -> u32 {
        let larger = |max: u32, x: &Self| max.max(x.bits() & Self::MAGNITUDE);
        values.iter().fold(0, larger)
    }
}

/// Replaces infinities in `out` by the largest number where `replaces(wide)`.
fn replace_infinities<T: Value>(wide: &[f32], out: &mut [T], replaces: impl Fn(f32) -> bool) {
    // Rarely needed: the search vectorizes.
    let beyond = |found, x: &f32| found | (x.abs() > T::LARGEST);
    if !wide.iter().fold(false, beyond) {
        return;
    }
    for (out, wide) in out.iter_mut().zip(wide) {
        if out.to_f32().is_infinite() && replaces(*wide) {
            *out = T::from_f32(T::LARGEST.copysign(*wide));
        }
    }
}

impl Value for f32 {
    const LARGEST: f32 = f32::MAX;
    const MAGNITUDE: u32 = 0x7FFF_FFFF;

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn of_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }

    fn round_at_random(_: StochasticKey, _: u64, wide: &[f32], out: &mut [Self]) {
        out.copy_from_slice(wide);
    }

    fn widened<'a>(values: &'a mut [Self], _: &'a mut [f32]) -> &'a mut [f32] {
        values
    }

    fn results<'a>(values: &'a [Self], _: &'a [f32]) -> &'a [f32] {
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
}

macro_rules! half {
    ($type:ident, $storage:ident) => {
        impl Value for $type {
            const LARGEST: f32 = <$type>::MAX.to_f32_const();
            const MAGNITUDE: u32 = 0x7FFF;

            fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$storage(values) => Some(values),
                    _ => None,
                }
            }

            #[inline(always)]
            fn bits(self) -> u32 {
                self.to_bits().into()
            }

            #[inline(always)]
            fn of_bits(bits: u32) -> Self {
                Self::from_bits(bits as u16)
            }

            fn round_at_random(key: StochasticKey, first: u64, wide: &[f32], out: &mut [Self]) {
                stochastic_round(key, first, wide, out);
            }
        }
    };
}
half!(f16, F16);
half!(bf16, BF16);
