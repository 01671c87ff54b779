//! FP8 GEMM on the host: in tiles if there are kernels for the processor (`blocked.rs`); otherwise, and for scales that change
//! within a tile, on decoded values (`decoded.rs`).

mod decoded;
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
mod side;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod decoder;
#[cfg(target_arch = "x86_64")]
mod engine_bf16;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod engine_f32;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg_attr(
    target_arch = "aarch64",
    allow(dead_code, reason = "only engines of bf16 fold scales")
)]
mod exponents;
#[cfg(target_arch = "x86_64")]
mod few_amx;
#[cfg(target_arch = "x86_64")]
mod finish_avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod in_slices;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod in_tasks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod pack_f32;
#[cfg(target_arch = "aarch64")]
mod pack_neon;
#[cfg(target_arch = "x86_64")]
mod packed_avx2;
#[cfg(target_arch = "x86_64")]
mod packed_avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod packed_f32;
#[cfg(target_arch = "aarch64")]
mod packed_neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod prefetch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod product;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg_attr(
    target_arch = "aarch64",
    allow(dead_code, reason = "only tiles of bf16 write results")
)]
mod results;
#[cfg(target_arch = "aarch64")]
mod row_neon;
#[cfg(target_arch = "x86_64")]
mod source_bf16;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg_attr(
    target_arch = "aarch64",
    allow(dead_code, reason = "only tiles of bf16 write results")
)]
mod stage;
#[cfg(target_arch = "x86_64")]
mod tile_amx;
#[cfg(target_arch = "x86_64")]
mod tile_bf16;
#[cfg(target_arch = "x86_64")]
mod tile_f32;
#[cfg(target_arch = "aarch64")]
mod tile_neon;

#[cfg(test)]
mod tests;

use crate::base::check::check_dims;
use crate::base::data::codes::{GemmCodes, GemmOperand, GemmOutput};
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Result, shape_error};
use crate::device::cpu::elements::{for_dtype, storage, tensor, with_slices};
use candle_core::{DType, Storage, Tensor};
use fp8_core::{Contraction, Format, Granularity, HighPrecision, Isa};
use half::bf16;
use side::{Elements, OP, Side, with_side};
use std::mem::MaybeUninit;

#[cfg(target_arch = "x86_64")]
use {
    engine_bf16::Bf16Engine,
    engine_f32::F32Engine,
    kernel::Engine,
    tile_f32::{Avx2, Avx512},
};

#[cfg(target_arch = "aarch64")]
use {engine_f32::F32Engine, kernel::Engine, pack_neon as pack_f32, tile_neon::Neon};

pub(super) use epilogue::Epilogue;
use layout::pack_codes;
pub(super) use layout::{Order, unpack_codes};
#[cfg(target_arch = "x86_64")]
pub(super) use {engine_f32::tiles, pack_bf16::transpose_16, tile_amx::Tiles, tile_bf16::as_bf16};

/// Evaluates `$body` with the fastest `$engine` for `$isa`; None if there is none.
#[cfg(target_arch = "x86_64")]
macro_rules! with_engine {
    ($isa:expr, $engine:ident => $body:expr) => {
        if let Some($engine) = Bf16Engine::of($isa) {
            Some($body)
        } else if let Some($engine) = F32Engine::<Avx512>::of($isa) {
            Some($body)
        } else if let Some($engine) = F32Engine::<Avx2>::of($isa) {
            Some($body)
        } else {
            None
        }
    };
}

/// Evaluates `$body` with the `$engine` for `$isa`; None if there is none.
#[cfg(target_arch = "aarch64")]
macro_rules! with_engine {
    ($isa:expr, $engine:ident => $body:expr) => {
        F32Engine::<Neon>::of($isa).map(|$engine| $body)
    };
}

/// The order of packed codes that the kernels of this processor read, if there are any.
pub(super) fn packed_order(isa: Isa) -> Option<Order> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        fn order<E: Engine>(_: E) -> Order {
            E::ORDER
        }
        with_engine!(isa, engine => order(engine))
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = isa;
        None
    }
}

/// The codes `[n, k]` as the kernels of this processor read them fastest, if there are any that read all of them.
pub(super) fn pack(isa: Isa, format: Format, codes: &[u8], n: usize, k: usize) -> Option<Vec<u8>> {
    let order = packed_order(isa)?;
    reads(order, format, codes).then(|| pack_codes(order, codes, n, k))
}

/// Whether kernels read all of these codes in this order.
fn reads(order: Order, format: Format, codes: &[u8]) -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        order == Order::Pairs || packed_f32::reads(format, codes)
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = (order, format, codes);
        false
    }
}

/// `[a.kept, b.kept]`, see [`crate::device::Backend::gemm`].
pub(super) fn gemm(
    isa: Isa,
    a: &GemmOperand<'_>,
    b: &GemmOperand<'_>,
    out: &GemmOutput<'_>,
) -> Result<Storage> {
    let wrong = |what, expected: String, got: &GemmOperand<'_>| {
        shape_error(OP, what, expected, vec![got.kept(), got.contracted()])
    };
    if a.contracted() != b.contracted() {
        let expected = format!("[_, {}], the length of operand A's sums", a.contracted());
        return Err(wrong("operand B [kept, contracted]", expected, b));
    }
    if matches!(a.codes, GemmCodes::Packed(_)) {
        let expected = "row-major codes: only B may be packed".to_string();
        return Err(wrong("operand A [kept, contracted]", expected, a));
    }
    if matches!(b.codes, GemmCodes::Packed(_))
        && packed_order(isa).is_some_and(|order| !reads(order, b.format, &[]))
    {
        let expected = format!("row-major codes: {} is never packed here", b.format);
        return Err(wrong("operand B [kept, contracted]", expected, b));
    }
    let bias = match out.bias {
        None => None,
        Some(bias) => {
            check_dims(OP, "bias", bias, &[b.kept()])?;
            if out.dtype == DType::F64 {
                return with_wide_bias(isa, (a, b), out, bias);
            }
            // Rounded to the output's dtype first.
            let bias = bias.to_dtype(out.dtype)?.to_dtype(DType::F32)?;
            Some(bias.to_vec1::<f32>()?)
        }
    };
    let bias = bias.as_deref();
    // Without an order, nothing is packed.
    let order = packed_order(isa).unwrap_or(Order::Columns);
    with_side(order, a, |a| {
        with_side(
            order,
            b,
            |b| for_dtype!(OP, "the output", out.dtype, T => Ok(storage(multiply::<T>(isa, a, b, bias)))),
        )
    })
}

/// [`gemm`] to f64. Epilogues add the bias in f32, so it is added after the product is done.
fn with_wide_bias(
    isa: Isa,
    (a, b): (&GemmOperand<'_>, &GemmOperand<'_>),
    out: &GemmOutput<'_>,
    bias: &Tensor,
) -> Result<Storage> {
    let product = gemm(isa, a, b, &GemmOutput { bias: None, ..*out })?;
    let product = tensor_of(product, (a.kept(), b.kept()))?;
    take_storage(product.broadcast_add(&bias.detach().to_dtype(DType::F64)?)?)
}

/// Whether this processor has instructions that multiply bf16.
pub(crate) fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Bf16Engine::of(Isa::best()).is_some()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// `[a.kept, b.kept]` in `dtype` of two matrices in bf16, see [`crate::device::Backend::product_bf16`].
pub(super) fn gemm_bf16(
    isa: Isa,
    a: (&Tensor, Contraction),
    b: (&Tensor, Contraction),
    dtype: DType,
) -> Result<Tensor> {
    const OP: &str = "bf16 gemm";
    let (a_sizes, b_sizes) = (a.0.dims2()?, b.0.dims2()?);
    with_slices([a.0, b.0], |[a_values, b_values]: [&[bf16]; 2]| {
        let a = bf16_side(a_values, a_sizes, a.1);
        let b = bf16_side(b_values, b_sizes, b.1);
        if a.contracted() != b.contracted() {
            let expected = format!("[_, {}], the length of operand A's sums", a.contracted());
            let got = vec![b.kept(), b.contracted()];
            return Err(shape_error(
                OP,
                "operand B [kept, contracted]",
                expected,
                got,
            ));
        }
        for_dtype!(OP, "the output", dtype, T => {
            tensor(multiply_bf16::<T>(isa, &a, &b), (a.kept(), b.kept()))
        })
    })?
}

/// An operand in bf16, without scales.
fn bf16_side(values: &[bf16], (rows, cols): (usize, usize), contraction: Contraction) -> Side<'_> {
    Side {
        elements: Elements::Bf16(values),
        // There are no codes.
        format: Format::E4M3,
        grid: Granularity::Tensorwise.grid(rows, cols, contraction),
        dequant_scales: &[1.],
        powers_of_two: true,
        contraction,
    }
}

fn multiply_bf16<T: HighPrecision>(isa: Isa, a: &Side<'_>, b: &Side<'_>) -> Vec<T> {
    filled(a.kept() * b.kept(), |out| {
        #[cfg(target_arch = "x86_64")]
        if let Some(engine) = Bf16Engine::of(isa) {
            return blocked::gemm(engine, a, b, None, out);
        }
        decoded::gemm(isa, a, b, None, out);
    })
}

fn multiply<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
) -> Vec<T> {
    filled(a.kept() * b.kept(), |out| {
        if !tiled(isa, a, b, bias, out) {
            decoded::gemm(isa, a, b, bias, out);
        }
    })
}

/// `len` values, which one of the GEMMs writes.
fn filled<T: HighPrecision>(len: usize, gemm: impl FnOnce(&mut [MaybeUninit<T>])) -> Vec<T> {
    let mut values = super::pages::vec_for::<T>(len);
    gemm(&mut values.spare_capacity_mut()[..len]);
    // SAFETY: GEMMs write every element, or panic.
    unsafe { values.set_len(len) };
    values
}

/// Multiplies in tiles, if there are any for this processor and these scales.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn tiled<T: HighPrecision>(
    isa: Isa,
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) -> bool {
    blocked::handles(a, b)
        && with_engine!(isa, engine => blocked::gemm(engine, a, b, bias, out)).is_some()
}

/// No tiles for this processor.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn tiled<T>(
    _: Isa,
    _: &Side<'_>,
    _: &Side<'_>,
    _: Option<&[f32]>,
    _: &mut [MaybeUninit<T>],
) -> bool {
    false
}
