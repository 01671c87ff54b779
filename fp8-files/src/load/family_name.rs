//! The names of the families.

use std::fmt;

/// The name of a family of checkpoints: the library whose names, scales and configuration a checkpoint has.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::FamilyName;
/// assert_eq!(FamilyName::FP8_BLOCKS.to_string(), "fp8 blocks (DeepSeek, Qwen)");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FamilyName(&'static str);

impl FamilyName {
    /// No FP8 weights.
    pub const HIGH_PRECISION: Self = Self::new("high precision");

    /// The name that messages and programs print. Each file of the folder `families` has one or more as constants.
    pub(super) const fn new(name: &'static str) -> Self {
        Self(name)
    }
}

impl fmt::Display for FamilyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}
