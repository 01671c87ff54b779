//! The instruction sets that have code of their own, and the one choice among them that all packages share.

use std::sync::OnceLock;

/// An instruction set that has code of its own. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum IsaLevel {
    /// What every processor of the target has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 BF16 (`vdpbf16ps`: pairs of bf16 products summed in f32) with the byte permutations of VBMI and GFNI. Only
    /// Cooper Lake has the first without the others.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// Tiles of bf16 products summed in f32 (AMX).
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl IsaLevel {
    /// From the slowest to the fastest.
    const ALL: &[Self] = &[
        Self::Portable,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Bf16,
        #[cfg(target_arch = "x86_64")]
        Self::Amx,
    ];

    /// The name that `FP8_ISA` knows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
        }
    }

    fn is_present(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("gfni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => super::amx::is_granted(),
        }
    }
}

/// An instruction set that this processor has: owning one is the proof that its code may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(IsaLevel);

impl Isa {
    /// Every instruction set of this processor, the fastest last.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        static COUNT: OnceLock<usize> = OnceLock::new();
        let is_present = |level: &&IsaLevel| level.is_present();
        let count = COUNT.get_or_init(|| IsaLevel::ALL.iter().take_while(is_present).count());
        IsaLevel::ALL[..*count].iter().map(|&level| Self(level))
    }

    /// The instruction set to use, chosen once: the fastest, or the one that the environment variable `FP8_ISA` names.
    /// A name that is unknown, or that of an instruction set the processor does not have, changes nothing.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::named(&std::env::var("FP8_ISA").unwrap_or_default()))
    }

    fn named(name: &str) -> Self {
        // Levels above the named one are not even asked for: the system grants AMX to the whole process.
        let wanted = IsaLevel::ALL.iter().position(|level| level.name() == name);
        match wanted.map(|index| &IsaLevel::ALL[..=index]) {
            Some([lower @ .., level]) if lower.iter().chain([level]).all(|l| l.is_present()) => {
                Self(*level)
            }
            _ => Self::available()
                .next_back()
                .unwrap_or(Self(IsaLevel::Portable)),
        }
    }

    /// Which one it is.
    pub fn level(self) -> IsaLevel {
        self.0
    }

    /// Whether the processor has the byte permutations of AVX-512 VBMI as well; some levels have a faster form then.
    pub(crate) fn has_vbmi(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            self.0 >= IsaLevel::Avx512 && is_x86_feature_detected!("avx512vbmi")
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_lowers_the_instruction_set_and_nothing_else_does() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(isa.level().name()), isa);
        }
        let fastest = Isa::available().next_back().unwrap();
        for name in ["", "AVX2", "sse9"] {
            assert_eq!(Isa::named(name), fastest, "{name:?}");
        }
    }

    #[test]
    fn levels_come_in_order() {
        assert_eq!(
            Isa::available().next().map(Isa::level),
            Some(IsaLevel::Portable)
        );
        assert!(Isa::available().is_sorted());
        assert!(IsaLevel::ALL.is_sorted());
    }
}
