//! The instruction sets that have their own code, and the choice among them, which all packages share.

use std::{fmt, sync::OnceLock};

use thiserror::Error;

/// An instruction set that has its own code. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum IsaLevel {
    /// What every processor of the target has.
    Portable,
    /// AVX2, FMA and F16C.
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
    /// NEON by hand. Every processor of this architecture has it, so the compiler uses it for portable code too. Has been run
    /// under an emulator only; its speed is unmeasured.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// A value of `FP8_ISA` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has this name.
    #[error(
        "FP8_ISA={name}: unknown instruction set; the levels are {levels}, of which this processor has {available}"
    )]
    Unknown {
        /// The name as given.
        name: String,
        /// All names.
        levels: Levels,
        /// Those that this machine has.
        available: Levels,
    },
    /// The processor or the operating system does not support it.
    #[error("FP8_ISA={}: this processor has only {available}", level.name())]
    Unavailable {
        /// The level asked for.
        level: IsaLevel,
        /// Those that this machine has.
        available: Levels,
    },
}

/// Some levels, from the slowest to the fastest; shown as a list of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels(&'static [IsaLevel]);

impl Levels {
    /// The levels.
    pub fn as_slice(self) -> &'static [IsaLevel] {
        self.0
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, level) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            f.write_str(level.name())?;
        }
        Ok(())
    }
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
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
    ];

    /// The name to give in `FP8_ISA`.
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
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
        }
    }

    fn is_present(self) -> bool {
        // Miri supports few of the vector instructions.
        if cfg!(miri) {
            return self == Self::Portable;
        }
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
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                // Parts of vectors are named in this order only.
                cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon")
            }
        }
    }
}

/// An instruction set that this processor has: holding one is proof that its code may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(IsaLevel);

impl Isa {
    /// Every instruction set of this processor, the fastest last.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        available().iter().map(|&level| Self(level))
    }

    /// The instruction set to use, chosen once: the fastest, or the one that the environment variable `FP8_ISA` names.
    ///
    /// # Errors
    /// If the name is unknown, or the processor does not have that instruction set. A program that asks for one level
    /// must not silently get another.
    pub fn from_env() -> Result<Self, IsaError> {
        chosen().clone()
    }

    /// [`Isa::from_env`], for code that cannot fail.
    ///
    /// # Panics
    /// If `FP8_ISA` is wrong, with the message of the error. Call [`Isa::from_env`] first to get an error instead, as the
    /// fallible functions built on this crate do.
    pub fn best() -> Self {
        match chosen() {
            Ok(isa) => *isa,
            Err(error) => panic!("{error}"),
        }
    }

    /// The instruction set of this name, as [`IsaLevel::name`] gives it.
    ///
    /// # Errors
    /// If the name is unknown, or the processor does not have that instruction set.
    pub fn named(name: &str) -> Result<Self, IsaError> {
        let Some(index) = IsaLevel::ALL.iter().position(|level| level.name() == name) else {
            return Err(IsaError::Unknown {
                name: name.to_owned(),
                levels: Levels(IsaLevel::ALL),
                available: Levels(available()),
            });
        };
        // Levels above the named one are not queried: asking for AMX would grant it to the whole process.
        if IsaLevel::ALL[..=index]
            .iter()
            .all(|level| level.is_present())
        {
            Ok(Self(IsaLevel::ALL[index]))
        } else {
            Err(IsaError::Unavailable {
                level: IsaLevel::ALL[index],
                available: Levels(available()),
            })
        }
    }

    /// Its level.
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

/// The levels that this processor has.
fn available() -> &'static [IsaLevel] {
    static COUNT: OnceLock<usize> = OnceLock::new();
    let is_present = |level: &&IsaLevel| level.is_present();
    let count = COUNT.get_or_init(|| IsaLevel::ALL.iter().take_while(is_present).count());
    &IsaLevel::ALL[..*count]
}

/// The choice of this process. The variable is read once: a program that ran half on one level and half on another would
/// give results that no run reproduces.
fn chosen() -> &'static Result<Isa, IsaError> {
    static CHOSEN: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
    CHOSEN.get_or_init(|| match std::env::var_os("FP8_ISA") {
        Some(name) if !name.is_empty() => Isa::named(&name.to_string_lossy()),
        _ => Ok(Isa(available()
            .last()
            .copied()
            .unwrap_or(IsaLevel::Portable))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gives_its_instruction_set() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(isa.level().name()), Ok(isa));
        }
    }

    #[test]
    fn a_wrong_name_is_an_error_that_lists_the_levels() {
        let present: Vec<&str> = Isa::available().map(|isa| isa.level().name()).collect();
        let present = present.join(", ");
        for name in ["AVX2", "sse9", " ", ""] {
            let error = Isa::named(name).unwrap_err().to_string();
            for part in [&format!("FP8_ISA={name}:"), "portable", &present] {
                assert!(error.contains(part), "{name:?}: {error}");
            }
        }
        for level in &IsaLevel::ALL[available().len()..] {
            let error = Isa::named(level.name()).unwrap_err();
            assert!(matches!(&error, IsaError::Unavailable { level: l, .. } if l == level));
            assert!(error.to_string().ends_with(&present), "{error}");
        }
    }

    #[test]
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    fn every_aarch64_has_neon() {
        let names: Vec<&str> = Isa::available().map(|isa| isa.level().name()).collect();
        assert_eq!(names, ["portable", "neon"]);
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
