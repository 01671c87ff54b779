//! Vector code: branch-free bodies, written once and compiled for each instruction set; the hot ones are also written by
//! hand for AVX-512.
//!
//! A body is an `#[inline(always)]` loop over chunks of fixed length; the `dispatch!` macro puts it into functions with
//! the target features of each instruction set, where the compiler vectorizes it. Each equals the scalar definition
//! of `cast.rs` and `format.rs` bit for bit, which the tests check on every instruction set of the machine.

pub(crate) mod amax;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod convert;
pub(crate) mod decode;
pub(crate) mod general;
pub(crate) mod halves;
mod isa;
mod narrowing;
pub(crate) mod nearest;
pub(crate) mod stochastic;
#[cfg(test)]
mod tests;
pub(crate) mod transpose;
mod widening;

pub use isa::{Isa, IsaError, IsaLevel, Levels};

/// Elements handled together: two AVX-512 or four AVX2 vectors of f32, and the block size of MX.
const LANES: usize = 32;

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
                $crate::kernels::IsaLevel::Portable => $body $(::<$($argument)+>)? ($($arg),*),
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
