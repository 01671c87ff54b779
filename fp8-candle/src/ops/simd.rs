//! Instruction sets picked at run time. The only unsafe code of the building blocks is here.

/// Runs `kernel` compiled for the widest vectors of this CPU.
///
/// `kernel` must be an `#[inline(always)]` closure, and so must be what it calls: only code inlined into the
/// instantiations below is compiled for their instruction sets. Every instantiation gives the same bits, since
/// kernels say where operations fuse (`mul_add`) and in which order they sum.
#[inline]
pub(super) fn simd<Out>(kernel: impl FnOnce() -> Out) -> Out {
    Isa::best().run(kernel)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Isa {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Baseline => true,
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn best() -> Self {
        [Self::Avx512, Self::Avx2]
            .into_iter()
            .find(|isa| isa.is_available())
            .unwrap_or(Self::Baseline)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Self {
        Self::Baseline
    }

    #[inline]
    fn run<Out>(self, kernel: impl FnOnce() -> Out) -> Out {
        match self {
            Self::Baseline => kernel(),
            // SAFETY: `best` and the tests construct this variant only where the CPU has these features.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(kernel) },
        }
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

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::Isa;
    use crate::ops::math::{Real, sum};

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let run = |isa: Isa| {
            isa.run(
                #[inline(always)]
                || {
                    let exps: Vec<u32> = x.iter().map(|&x| Real::exp(x).to_bits()).collect();
                    (exps, sum(&x, |x| x * x).to_bits())
                },
            )
        };
        let baseline = run(Isa::Baseline);
        for isa in [Isa::Avx2, Isa::Avx512]
            .into_iter()
            .filter(|isa| isa.is_available())
        {
            assert_eq!(run(isa), baseline, "{isa:?}");
        }
    }
}
