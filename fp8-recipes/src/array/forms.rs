//! The forms in which most operations of arrays are written.

/// Operations that a wide node leaves to candle: it computes and differentiates `$plain`. [`Scaled`] has a method of the same name.
macro_rules! composed {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),*) = |$x:ident| $plain:expr;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If shapes or dtypes are incompatible.
        fn $name(&self, $($arg: $type),*) -> Result<Self> {
            let scaled = |x: &[&Scaled]| Ok(x[0].$name($($arg),*)?);
            // The node calls it again in the backward pass.
            $(let $arg = $arg.to_owned();)*
            let plain = move |x: &[Tensor]| {
                let $x = &x[0];
                Ok($plain)
            };
            Self::combine(&[self], plain, scaled)
        }
    )*};
}

/// Operations of two arrays, whose shapes are broadcast.
macro_rules! of_two {
    ($(
        $(#[$doc:meta])*
        fn $name:ident = $plain:ident;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If shapes or dtypes are incompatible.
        fn $name(&self, other: &Self) -> Result<Self> {
            let plain = |x: &[Tensor]| Ok(x[0].$plain(&x[1])?);
            Self::combine(&[self, other], plain, |x| Ok(x[0].$name(x[1])?))
        }
    )*};
}

/// Operations for which [`InNode`] has a method of the same name, as [`Scaled`] has.
macro_rules! built_in {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),*) = |$x:ident| $plain:expr;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If shapes or dtypes are incompatible.
        fn $name(&self, $($arg: $type),*) -> Result<Self> {
            self.by_kind(
                |$x| Ok($plain),
                |x| Ok(x.$name($($arg),*)?),
                |x| x.$name($($arg),*),
            )
        }
    )*};
}

pub(super) use {built_in, composed, of_two};
