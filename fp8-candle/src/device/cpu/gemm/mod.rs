//! FP8 GEMM on the host: in tiles if there are kernels for the processor (`blocked.rs`); otherwise, and for scales that change
//! within a tile, on decoded slabs (`slab.rs`).

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "tiles use the rest")
)]
mod epilogue;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "tiles use the rest")
)]
mod layout;
mod scales;
mod scratch;
mod side;
mod slab;

#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod decoder;
#[cfg(target_arch = "x86_64")]
mod engine_bf16;
#[cfg(target_arch = "x86_64")]
mod engine_f32;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod pack_f32;
#[cfg(target_arch = "x86_64")]
mod packed_avx2;
#[cfg(target_arch = "x86_64")]
mod product;
mod results;
#[cfg(target_arch = "x86_64")]
mod tile_amx;
#[cfg(target_arch = "x86_64")]
mod tile_avx2;
#[cfg(target_arch = "x86_64")]
mod tile_avx512;
#[cfg(target_arch = "x86_64")]
mod tile_bf16;

#[cfg(test)]
mod tests;

use crate::base::data::codes::{GemmCodes, GemmOperand, GemmOutput};
use crate::base::error::{Error, Result};
use candle_core::{CpuStorage, DType};
use fp8_core::{HighPrecision, Isa};
use side::{Side, with_side};
use std::mem::MaybeUninit;

#[cfg(target_arch = "x86_64")]
use {
    engine_bf16::Bf16Engine, engine_f32::F32Engine, kernel::Engine, tile_avx2::Avx2,
    tile_avx512::Avx512,
};

pub(super) use layout::{Order, pack_codes, unpack_codes};
#[cfg(target_arch = "x86_64")]
pub(super) use scratch::{Plain, Scratch};

/// The order of packed codes that the kernels of this processor read, if it has any.
pub(super) fn packed_order(isa: Isa) -> Option<Order> {
    #[cfg(target_arch = "x86_64")]
    {
        let order = Bf16Engine::of(isa).map(|_| Bf16Engine::ORDER);
        let order = order.or(F32Engine::<Avx512>::of(isa).map(|_| F32Engine::<Avx512>::ORDER));
        order.or(F32Engine::<Avx2>::of(isa).map(|_| F32Engine::<Avx2>::ORDER))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        None
    }
}

/// `[a.kept, b.kept]`, see [`crate::device::Backend::gemm`].
pub(super) fn gemm(
    isa: Isa,
    a: &GemmOperand<'_>,
    b: &GemmOperand<'_>,
    out: &GemmOutput<'_>,
) -> Result<CpuStorage> {
    let wrong = |what, expected: String, got: &GemmOperand<'_>| Error::Shape {
        op: "fp8 gemm",
        what,
        expected,
        got: vec![got.kept(), got.contracted()],
    };
    if a.contracted() != b.contracted() {
        let expected = format!("[_, {}], the length of operand A's sums", a.contracted());
        return Err(wrong("operand B [kept, contracted]", expected, b));
    }
    if matches!(a.codes, GemmCodes::Packed(_)) {
        let expected = "row-major codes: only B may be packed".to_string();
        return Err(wrong("operand A [kept, contracted]", expected, a));
    }
    if let Some(bias) = out.bias.filter(|bias| bias.dims() != [b.kept()]) {
        return Err(Error::Shape {
            op: "fp8 gemm",
            what: "bias",
            expected: format!("[{}]", b.kept()),
            got: bias.dims().to_vec(),
        });
    }
    let bias = match out.bias {
        None => None,
        Some(bias) => Some(
            bias.to_dtype(out.dtype)?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?,
        ),
    };
    let bias = bias.as_deref();
    // Without an order, nothing is packed.
    let order = packed_order(isa).unwrap_or(Order::Columns);
    with_side(order, a, |a| {
        with_side(order, b, |b| {
            Ok(match out.dtype {
                DType::F32 => CpuStorage::F32(multiply(isa, a, b, bias)),
                DType::BF16 => CpuStorage::BF16(multiply(isa, a, b, bias)),
                DType::F16 => CpuStorage::F16(multiply(isa, a, b, bias)),
                DType::F64 => CpuStorage::F64(multiply(isa, a, b, bias)),
                got => {
                    return Err(Error::DType {
                        op: "fp8 gemm",
                        what: "the output",
                        expected: "f32, bf16, f16 or f64",
                        got,
                    });
                }
            })
        })
    })
}

fn multiply<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
) -> Vec<T> {
    let len = a.kept() * b.kept();
    let mut values = super::pages::vec_for::<T>(len);
    let out: &mut [MaybeUninit<T>] = &mut values.spare_capacity_mut()[..len];
    if !tiled(isa, a, b, bias, out) {
        slab::gemm(a, b, bias, out);
    }
    // SAFETY: both GEMMs write every element, or panic.
    unsafe { values.set_len(len) };
    values
}

/// Multiplies in tiles, if there are any for this processor and these scales.
#[cfg(target_arch = "x86_64")]
fn tiled<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) -> bool {
    if !blocked::handles(a, b) {
        return false;
    }
    if let Some(engine) = Bf16Engine::of(isa) {
        blocked::gemm(engine, a, b, bias, out);
    } else if let Some(engine) = F32Engine::<Avx512>::of(isa) {
        blocked::gemm(engine, a, b, bias, out);
    } else if let Some(engine) = F32Engine::<Avx2>::of(isa) {
        blocked::gemm(engine, a, b, bias, out);
    } else {
        return false;
    }
    true
}

/// There are no tiles for this processor.
#[cfg(not(target_arch = "x86_64"))]
fn tiled<T>(
    _: Isa,
    _: &Side<'_>,
    _: &Side<'_>,
    _: Option<&[f32]>,
    _: &mut [MaybeUninit<T>],
) -> bool {
    false
}
