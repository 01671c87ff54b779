//! The element types that casts read and write.

pub(crate) mod sealed {
    /// Which type it is, as a constant that selects code for it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        F32,
        Bf16,
        F16,
        F64,
    }

    pub trait Sealed {
        const KIND: Kind;

        /// |x| as an integer in the order of the values, with NaN above infinity.
        type Magnitude: Copy + Default + Ord;

        fn magnitude(self) -> Self::Magnitude;

        /// The sign bit.
        fn sign_bit(self) -> bool;

        /// The bits of the f32 of the same value.
        fn magnitude_bits(magnitude: Self::Magnitude) -> u32;
    }
}

/// A type to cast from and to: f32, bf16, f16 or f64. Sealed.
///
/// All arithmetic is in f32. bf16 and f16 are exact in it; an f64 is first rounded to the nearest f32.
pub trait HighPrecision: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The value in f32, in which everything is computed.
    fn to_f32(self) -> f32;

    /// The value nearest to `value`, ties to even.
    fn from_f32(value: f32) -> Self;

    /// [`HighPrecision::from_f32`] of each value, as many as both slices have; the bits of a NaN may differ.
    #[inline(always)]
    fn narrow(values: &[f32], narrowed: &mut [Self]) {
        for (narrowed, &value) in narrowed.iter_mut().zip(values) {
            *narrowed = Self::from_f32(value);
        }
    }
}
