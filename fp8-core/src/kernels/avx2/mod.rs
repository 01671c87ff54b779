//! Casts and decoding by hand for AVX2: 32 elements at a time.

pub(super) mod decode;
pub(super) mod encode;

use super::{Isa, IsaLevel};

/// Whether the functions of this module may be called.
pub(super) fn is_in(isa: Isa) -> bool {
    isa.level() == IsaLevel::Avx2
}
