//! Loops compiled for several instruction sets, chosen at run time.

use crate::base::error::Error;
use fp8_core::Isa;
#[cfg(target_arch = "x86_64")]
use fp8_core::IsaLevel;

/// Checks that there is an instruction set to run on: `FP8_ISA` may name one that is not available. Everything on the CPU
/// begins with this check; what follows may use [`Isa::best`], which then cannot fail.
pub(crate) fn check() -> Result<(), Error> {
    Isa::from_env()?;
    Ok(())
}

/// Runs `kernel` compiled for the widest vectors of this processor, or those that `FP8_ISA` allows.
///
/// `kernel` must be an `#[inline(always)]` closure that calls `#[inline(always)]` functions: only inlined code is
/// compiled for these vectors. Every instruction set gives the same bits: kernels say where operations fuse (`mul_add`), and in
/// which order they sum.
///
/// # Examples
/// ```
/// let (x, mut y) = (vec![2f32; 1000], vec![1f32; 1000]);
/// fp8_candle::parallel::vectorized(
///     #[inline(always)]
///     || {
///         for (y, x) in y.iter_mut().zip(&x) {
///             *y += x.sqrt();
///         }
///     },
/// );
/// assert_eq!(y[0], 1.0 + 2f32.sqrt());
/// ```
#[inline]
pub fn simd<Out>(kernel: impl FnOnce() -> Out) -> Out {
    run(Isa::best(), kernel)
}

#[inline]
fn run<Out>(isa: Isa, kernel: impl FnOnce() -> Out) -> Out {
    match isa.level() {
        // SAFETY: an `Isa` of these levels exists only where avx2 and fma were found.
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx2 => unsafe { avx2(kernel) },
        // SAFETY: an `Isa` of these levels exists only where these features were found.
        #[cfg(target_arch = "x86_64")]
        IsaLevel::Avx512 | IsaLevel::Avx512Bf16 | IsaLevel::Amx => unsafe { avx512(kernel) },
        // Portable code, for which the compiler uses what the target has: NEON on aarch64.
        _ => kernel(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<Out>(kernel: impl FnOnce() -> Out) -> Out {
    kernel()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<Out>(kernel: impl FnOnce() -> Out) -> Out {
    kernel()
}

#[cfg(test)]
mod tests {
    use super::{Isa, run};
    use crate::base::math::{Real, sum};

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let results = Isa::available().map(|isa| {
            run(
                isa,
                #[inline(always)]
                || {
                    let exps: Vec<u32> = x.iter().map(|&x| Real::exp(x).to_bits()).collect();
                    (exps, sum(&x, |x| x * x).to_bits())
                },
            )
        });
        let results: Vec<_> = results.collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}
