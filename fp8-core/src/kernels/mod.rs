//! Vector code: branch-free loops, written once and compiled for each instruction set. The hot ones are also written by
//! hand for AVX-512 and NEON, nearest-even casts and decoding for AVX2 too.
//!
//! A body is a loop over chunks of fixed length. The `dispatch!` macro inlines it into functions with the target features of
//! each instruction set, where the compiler vectorizes it. Every kernel equals the scalar definition in `cast.rs` and
//! `format.rs` bit for bit; tests check this on every instruction set of the machine.

pub(crate) mod amax;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod convert;
pub(crate) mod decode;
pub(crate) mod divided;
pub(crate) mod expanded;
pub(crate) mod general;
pub(crate) mod groups;
pub(crate) mod halves;
mod isa;
mod narrowing;
pub(crate) mod nearest;
#[cfg(target_arch = "aarch64")]
mod neon;
mod prefetch;
pub(crate) mod stochastic;
#[cfg(test)]
mod tests;
pub(crate) mod transpose;
mod widening;

pub use isa::{Isa, IsaError, IsaLevel, Levels};
pub use prefetch::{prefetch, prefetch_line};

/// Elements handled together: two AVX-512 or four AVX2 vectors of f32, and the block size of MX.
const LANES: usize = 32;

/// Which elements of a slice share a scale.
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    /// One scale for every run of this many elements; the last run may be shorter.
    Segments(usize),
    /// One scale for each element.
    PerElement,
}

/// Defines a function whose first argument is the instruction set that its body runs under. Type parameters are listed twice: with
/// their bounds, and without.
macro_rules! dispatch {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $([$($generic:tt)+] [$($argument:tt)+])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        $vis fn $name $(<$($generic)+>)? (isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($generic)+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512 $(<$($generic)+>)? ($($arg: $ty),*) $(-> $ret)? {
                body $(::<$($argument)+>)? ($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generic)+>)? ($($arg: $ty),*) $(-> $ret)? {
                body $(::<$($argument)+>)? ($($arg),*)
            }

            match isa.level() {
                $crate::kernels::IsaLevel::Portable => body $(::<$($argument)+>)? ($($arg),*),
                // The target has NEON, so the code above uses it already.
                #[cfg(target_arch = "aarch64")]
                $crate::kernels::IsaLevel::Neon => body $(::<$($argument)+>)? ($($arg),*),
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::IsaLevel::Avx2 => {
                    // SAFETY: an `Isa` of this level exists only where avx2 and fma were found.
                    unsafe { avx2 $(::<$($argument)+>)? ($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::IsaLevel::Avx512
                | $crate::kernels::IsaLevel::Avx512Bf16
                | $crate::kernels::IsaLevel::Amx => {
                    // SAFETY: an `Isa` of these levels exists only where these four features were found.
                    unsafe { avx512 $(::<$($argument)+>)? ($($arg),*) }
                }
            }
        }
    };
}
pub(crate) use dispatch;
