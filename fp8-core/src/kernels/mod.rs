//! Vector code: branch-free bodies written once and compiled for each instruction set.
//!
//! A body is an `#[inline(always)]` loop over chunks of fixed length; the `dispatch!` macro puts it into functions with
//! the target features of each instruction set, where the compiler vectorizes it. Each equals the scalar definition
//! of `cast.rs` and `format.rs` bit for bit, which `tests.rs` checks on every instruction set of the machine.

pub(crate) mod amax;
pub(crate) mod convert;
pub(crate) mod decode;
pub(crate) mod general;
pub(crate) mod nearest;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

/// Elements handled together: two AVX-512 or four AVX2 vectors of f32, and the block size of MX.
const LANES: usize = 32;

/// An instruction set that this processor has. Only [`Isa::new`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// From the slowest to the fastest.
    const ALL: &[Self] = &[
        Self::Portable,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }
}

impl Isa {
    /// `level`, where the processor has it.
    fn new(level: Level) -> Option<Self> {
        let present = match level {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        };
        present.then_some(Self(level))
    }

    /// Every instruction set of this processor, the fastest last.
    fn available() -> impl DoubleEndedIterator<Item = Self> {
        Level::ALL.iter().filter_map(|&level| Self::new(level))
    }

    /// The instruction set to use: the one that `FP8_ISA` names, chosen once.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::named(&std::env::var("FP8_ISA").unwrap_or_default()))
    }

    /// The instruction set called `name` where the processor has it, else the fastest.
    fn named(name: &str) -> Self {
        let named = Self::available().find(|isa| isa.0.name() == name);
        named
            .or_else(|| Self::available().next_back())
            .unwrap_or(Self(Level::Portable))
    }

    pub(crate) fn level(self) -> Level {
        self.0
    }
}

/// Defines a function that runs `$body` under the instruction set given as its first argument.
macro_rules! dispatch {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $([$($generic:tt)+] [$($argument:tt)+])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident
    ) => {
        $(#[$meta])*
        $vis fn $name $(<$($generic)+>)? (isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512 $(<$($generic)+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body $(::<$($argument)+>)? ($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generic)+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body $(::<$($argument)+>)? ($($arg),*)
            }

            match isa.level() {
                $crate::kernels::Level::Portable => $body $(::<$($argument)+>)? ($($arg),*),
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::Level::Avx2 => {
                    // SAFETY: an `Isa` of this level exists only where `Isa::new` has found avx2 and fma.
                    unsafe { avx2 $(::<$($argument)+>)? ($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::Level::Avx512 => {
                    // SAFETY: an `Isa` of this level exists only where `Isa::new` has found these four features.
                    unsafe { avx512 $(::<$($argument)+>)? ($($arg),*) }
                }
            }
        }
    };
}
pub(crate) use dispatch;
