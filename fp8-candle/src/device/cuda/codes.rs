//! Decoding, transposing and padding codes; candle's F8E4M3.

use super::gpu::{Gpu, with_pointers};
use super::kernels::{Arg, Shape, args, kernels};
use super::launch::launch;
use crate::base::check::check_dtype;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, internal};
use crate::device::backend::Backend;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::{CudaStorage, DType, Device, Storage, Tensor};
use fp8_core::{Format, ScaleGrid};

kernels! { CODE_KERNELS in DECODE;
    DEQUANTIZE = floats "fp8_dequantize"("pppllllli");
    TRANSPOSE_TILES = one "fp8_transpose_tiles"("ppiii");
    TRANSPOSE_CODES = one "fp8_transpose_codes"("pplll");
    PAD_CODES = one "fp8_pad_codes"("ppllll");
}

/// `decode(codes) * dequant_scale` in f32, rounded to `dtype`.
pub(super) fn dequantize(
    codes: &Tensor,
    format: Format,
    grid: &ScaleGrid,
    dequant_scale: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    if dtype == DType::F64 {
        return Ok(dequantize(codes, format, grid, dequant_scale, DType::F32)?.to_dtype(dtype)?);
    }
    let kernel = DEQUANTIZE.of("dequantize", dtype)?;
    let (codes, dequant_scale) = (codes.contiguous()?, dequant_scale.contiguous()?);
    let n = codes.elem_count();
    let gpu = Gpu::of(&codes)?;
    if n == 0 {
        return gpu.zero_tensor(dtype, codes.shape());
    }
    let out = gpu.alloc(dtype, n)?;
    with_pointers(&gpu, [&codes, &dequant_scale], |[code_ptr, scale_ptr]| {
        let args = args![
            p code_ptr, p scale_ptr, p out.ptr(), l n, l grid.cols(), l grid.block_rows(),
            l grid.block_cols(), l grid.scale_cols(), i format as u32,
        ];
        // SAFETY: n codes and values, and as many scales as the grid has.
        unsafe { launch(&gpu, kernel, Shape::stride(n.div_ceil(16)), &args) }
    })?;
    out.into_tensor(codes.shape())
}

/// `[cols, out_rows]`: the transpose of `[rows, cols]`, its rows padded with zeros to `out_rows`.
pub(super) fn transpose(codes: &Tensor, out_rows: usize) -> Result<Tensor> {
    let (rows, cols) = codes.dims2()?;
    let codes = codes.contiguous()?;
    let gpu = Gpu::of(&codes)?;
    if cols * out_rows == 0 {
        return gpu.zero_tensor(DType::U8, (cols, out_rows));
    }
    let out = gpu.alloc(DType::U8, cols * out_rows)?;
    with_pointers(&gpu, [&codes], |[from]| {
        let fits = |n: usize| n.is_multiple_of(16) && n < 1 << 31;
        if fits(cols) && fits(out_rows) && rows <= out_rows && from.is_multiple_of(16) {
            let sizes = [rows, cols, out_rows].map(|n| Arg::Int(n as u32));
            let args = [
                Arg::Ptr(from),
                Arg::Ptr(out.ptr()),
                sizes[0],
                sizes[1],
                sizes[2],
            ];
            let shape = Shape {
                resident: true,
                ..Shape::blocks(cols.div_ceil(128) * out_rows.div_ceil(128), 256)
            };
            // SAFETY: rows * cols codes in, cols * out_rows out; rows of both begin at multiples of 16 bytes.
            return unsafe { launch(&gpu, &TRANSPOSE_TILES, shape, &args) };
        }
        let args = args![p from, p out.ptr(), l rows, l cols, l out_rows];
        let tiles = cols.div_ceil(32) * out_rows.div_ceil(32);
        // SAFETY: rows * cols codes in, cols * out_rows out.
        unsafe { launch(&gpu, &TRANSPOSE_CODES, Shape::blocks(tiles, 256), &args) }
    })?;
    out.into_tensor((cols, out_rows))
}

/// `[out_rows, out_cols]`: `codes` with zeros to its right and below.
pub(super) fn pad(codes: &Tensor, out_rows: usize, out_cols: usize) -> Result<Tensor> {
    let (rows, cols) = codes.dims2()?;
    let codes = codes.contiguous()?;
    let gpu = Gpu::of(&codes)?;
    let out = gpu.alloc(DType::U8, out_rows * out_cols)?;
    with_pointers(&gpu, [&codes], |[from]| {
        let args = args![p from, p out.ptr(), l rows, l cols, l out_rows, l out_cols];
        let shape = Shape::stride(out_rows * out_cols);
        // SAFETY: rows * cols codes in, out_rows * out_cols out.
        unsafe { launch(&gpu, &PAD_CODES, shape, &args) }
    })?;
    out.into_tensor((out_rows, out_cols))
}

/// The bits of U8 codes as candle's F8E4M3.
pub(super) fn to_f8e4m3(codes: &Tensor) -> Result<Tensor> {
    let codes = codes.contiguous()?;
    // SAFETY: F8E4M3 is one byte, and every byte is a value of it.
    unsafe { bytes_as::<u8, float8::F8E4M3>("codes_to_f8e4m3", &codes, CudaStorageSlice::F8E4M3) }
}

/// The bits of candle's F8E4M3 as U8.
pub(super) fn from_f8e4m3(x: &Tensor) -> Result<Tensor> {
    if !x.is_contiguous() {
        // candle can copy a strided FP8 tensor on the host, but not on a GPU.
        let here = x.to_device(&Device::Cpu)?;
        return Ok(crate::device::cpu::CpuBackend
            .f8e4m3_to_codes(&here)?
            .to_device(x.device())?);
    }
    check_dtype("f8e4m3_to_codes", "the tensor", x, DType::F8E4M3)?;
    // SAFETY: F8E4M3 is one byte, and so is u8.
    unsafe { bytes_as::<float8::F8E4M3, u8>("f8e4m3_to_codes", x, CudaStorageSlice::U8) }
}

/// The bytes of a contiguous tensor of `A` as elements of type `B`.
///
/// # Safety
/// Both types have one byte, and the bytes of `A` are values of `B`.
unsafe fn bytes_as<A: CudaDType + DeviceRepr, B: DeviceRepr + ValidAsZeroBits>(
    op: &'static str,
    x: &Tensor,
    slice: fn(CudaSlice<B>) -> CudaStorageSlice,
) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        internal!("{op}: the tensor is not on a CUDA device");
    };
    let n = x.elem_count();
    let mut out: CudaSlice<B> = gpu.device().alloc_zeros(n)?;
    let from = storage.as_cuda_slice::<A>()?;
    let from = from.slice(layout.start_offset()..layout.start_offset() + n);
    // SAFETY: the caller guarantees both types.
    let view = unsafe { from.transmute::<B>(n) };
    let Some(view) = view.filter(|view| view.len() == n) else {
        internal!("{op}: the bytes of {n} elements are not {n} elements");
    };
    gpu.device().memcpy_dtod(&view, &mut out)?;
    let device = gpu.device().clone();
    let storage = Storage::Cuda(CudaStorage {
        slice: slice(out),
        device,
    });
    tensor_of(storage, x.shape())
}
