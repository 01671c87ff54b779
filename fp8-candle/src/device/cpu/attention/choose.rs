//! Which units multiply.

/// Runs `$body` with the fastest `$units`.
#[cfg(target_arch = "x86_64")]
macro_rules! with_units {
    ($in_bf16:expr, $units:ident => $body:expr) => {{
        use $crate::device::cpu::attention::amx_units::AmxUnits;
        use $crate::device::cpu::attention::x86_units::{Avx2, Avx512, Bf16Units};
        let (isa, in_bf16) = (fp8_core::Isa::best(), $in_bf16);
        if let Some($units) = AmxUnits::of(isa).filter(|_| in_bf16) {
            $body
        } else if let Some($units) = Bf16Units::of(isa).filter(|_| in_bf16) {
            $body
        } else if let Some($units) = Avx512::units(isa, in_bf16) {
            $body
        } else if let Some($units) = Avx2::units(isa, in_bf16) {
            $body
        } else {
            let $units = $crate::device::cpu::attention::f32_units::in_plain_rust(in_bf16);
            $body
        }
    }};
}

/// Runs `$body` with the only `$units`.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! with_units {
    ($in_bf16:expr, $units:ident => $body:expr) => {{
        let $units = $crate::device::cpu::attention::f32_units::in_plain_rust($in_bf16);
        $body
    }};
}
pub(super) use with_units;
