//! Large tensors in parts: some of their rows at a time.

use super::source::Source;
use crate::check::first_outside;
use crate::contents::Described;
use crate::error::{Error, Result};
use crate::scheme::static_scale;
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Contraction, Format, Granularity};
use std::ops::Range;

/// The most elements of a part. The steps of its computation then find it in the processor's cache, and allocators use its memory again
/// for the next part: with parts of some hundred megabytes, fresh pages for each of them took most of a rewrite's time.
const MOST: usize = 1 << 20;

/// Elements of a part, for a number of bytes of memory. Several threads hold a part each: as stored, in f32, and in intermediate steps.
pub(super) fn slab(memory: u64) -> usize {
    usize::try_from(memory / 64).unwrap_or(MOST).clamp(1, MOST)
}

/// Bytes that a value of a part takes while it is computed: as stored, in f32, and once more in one of its steps.
const OF_PART: usize = 10;

/// Bytes that a value of a whole tensor takes. The source may add two tensors of f32 to make a third.
const OF_WHOLE: usize = 20;

/// The most bytes that the values of a tensor take while it is written: those of a part, if the source reads its rows.
pub(super) fn bytes(
    source: &dyn Source,
    name: &str,
    elements: usize,
    slab: usize,
) -> Result<usize> {
    let in_parts = elements <= slab || source.rows(name, 0..1, DType::F32)?.is_some();
    Ok(match in_parts {
        true => elements.min(slab) * OF_PART,
        false => elements * OF_WHOLE,
    })
}

/// Rows of a part: whole blocks of `block` rows.
fn rows_of(dims: &[usize], block: usize, slab: usize) -> usize {
    let width: usize = dims.iter().skip(1).product();
    let rows = slab / width.max(1);
    (rows / block * block).max(block)
}

/// Calls `take` with the first row of each part of a tensor and its value, in order. A tensor of up to `slab` elements, or one that the
/// source reads only whole, is one part.
pub(super) fn each(
    source: &dyn Source,
    name: &str,
    dtype: DType,
    (block, slab): (usize, usize),
    mut take: impl FnMut(usize, Tensor) -> Result<()>,
) -> Result<()> {
    let dims = source.shape(name).unwrap_or_default();
    let all = dims.first().copied().unwrap_or(1);
    let step = rows_of(&dims, block, slab);
    // Masks are as good with infinities.
    let narrows =
        dtype == DType::F16 && source.dtype(name) != Some(dtype) && !name.ends_with(".masked_bias");
    let width: usize = dims.iter().skip(1).product();
    let mut take = |rows: Range<usize>, part: Tensor| {
        let got = part.dims().first().copied().unwrap_or(1);
        if got != rows.len() {
            return Err(Error::TensorShape {
                tensor: name.to_string(),
                got: part.dims().to_vec(),
                expected: format!("{} rows of {dims:?}", rows.len()),
            });
        }
        if narrows && first_outside(&part, f64::is_finite)?.is_some() {
            let most = f64::from(half::f16::MAX);
            let exact = match source.rows(name, rows.clone(), DType::F32)? {
                Some(exact) => exact,
                None => source.value(name, DType::F32)?,
            };
            // What is not finite in the source stays what it is.
            if let Some((index, value)) =
                first_outside(&exact, |x| !x.is_finite() || x.abs() <= most)?
            {
                return Err(Error::TensorValue {
                    tensor: name.to_string(),
                    index: rows.start * width + index,
                    value,
                    expected: "within the range of f16 (bf16 holds larger numbers)".into(),
                });
            }
        }
        take(rows.start, part)
    };
    if step < all {
        for first in (0..all).step_by(step) {
            let rows = first..all.min(first + step);
            match source.rows(name, rows.clone(), dtype)? {
                Some(part) => take(rows, part)?,
                None => return take(0..all, source.value(name, dtype)?),
            }
        }
        return Ok(());
    }
    take(0..all, source.value(name, dtype)?)
}

/// The codes and scales of a layer whose weight is the tensor `name`. Every part has the codes and scales that it has in the whole.
pub(super) fn quantize(
    source: &dyn Source,
    layer: &Described,
    name: &str,
    slab: usize,
) -> Result<Fp8Tensor> {
    let (n, k) = layer.sizes;
    let block = match layer.scheme.weight {
        Granularity::Blockwise { rows, .. } => rows.max(1),
        _ => 1,
    };
    let finite = |first: usize, weight: &Tensor| match first_outside(weight, f64::is_finite)? {
        None => Ok(()),
        Some((index, value)) => Err(Error::TensorValue {
            tensor: name.to_string(),
            index: first * k + index,
            value,
            expected: "finite, as a weight has to be".into(),
        }),
    };
    if rows_of(&[n, k], block, slab) >= n {
        let weight = source.value(name, DType::F32)?;
        finite(0, &weight)?;
        return layer.scheme.quantize(&weight, None, false, &layer.path);
    }
    // One scale for the whole has to be known before the first code.
    let mut scale = None;
    if layer.scheme.weight == Granularity::Tensorwise {
        let mut amax = 0f32;
        each(source, name, DType::F32, (block, slab), |first, weight| {
            finite(first, &weight)?;
            let part = weight.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            amax = amax.max(part);
            Ok(())
        })?;
        scale = Some(static_scale(amax, &Device::Cpu, &layer.path, "weight")?);
    }
    let (mut codes, mut scales) = (Vec::with_capacity(n * k), vec![]);
    each(source, name, DType::F32, (block, slab), |first, weight| {
        if scale.is_none() {
            finite(first, &weight)?;
        }
        let part = layer
            .scheme
            .quantize(&weight, scale.clone(), false, &layer.path)?;
        drop(weight);
        codes.extend(part.codes().flatten_all()?.to_vec1::<u8>()?);
        scales.extend(part.dequant_scale().flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    })?;
    let codes = Tensor::from_vec(codes, (n, k), &Device::Cpu)?;
    let scales = match scale {
        Some(scale) => scale,
        None => {
            let grid = crate::scheme::grid(layer.scheme.weight, n, k);
            let shape = (grid.scale_rows(), grid.scale_cols());
            Tensor::from_vec(scales, shape, &Device::Cpu)?
        }
    };
    let (granularity, contraction) = (layer.scheme.weight, Contraction::Cols);
    let codes = Fp8Tensor::from_parts(codes, Format::E4M3, granularity, contraction, scales)?;
    Ok(codes)
}

/// How far a layer's codes are from its weight, and from what was added to it.
pub(super) struct Distance {
    /// The norm of the difference over the norm of the weight; 0 for a weight of zeros.
    pub(super) relative: f32,
    /// The norm of the difference over the norm of the update; None without an update, or if that is zero.
    pub(super) of_update: Option<f32>,
}

/// The distance between a layer's codes and its weight, the tensor `name`.
pub(super) fn distance(
    source: &dyn Source,
    name: &str,
    codes: &Fp8Tensor,
    slab: usize,
) -> Result<Distance> {
    let granularity = codes.granularity();
    let block = match granularity {
        Granularity::Blockwise { rows, .. } => rows.max(1),
        _ => 1,
    };
    let squares =
        |x: &Tensor| -> Result<f64> { Ok(x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()?) };
    let (mut difference, mut whole) = (0f64, 0f64);
    each(source, name, DType::F32, (block, slab), |first, weight| {
        let rows = weight.dim(0)?;
        let own = codes.codes().narrow(0, first, rows)?;
        let scale = match granularity {
            Granularity::Tensorwise => codes.dequant_scale().clone(),
            _ => (codes.dequant_scale()).narrow(0, first / block, rows.div_ceil(block))?,
        };
        let (format, contraction) = (codes.format(), Contraction::Cols);
        let own = Fp8Tensor::from_parts(own, format, granularity, contraction, scale)?;
        difference += squares(&(own.dequantize(DType::F32)? - &weight)?)?;
        whole += squares(&weight)?;
        Ok(())
    })?;
    let ratio = |whole: f64| (whole > 0.).then(|| (difference / whole).sqrt() as f32);
    let update = source.update(name)?;
    let update = update.map(|update| squares(&update)).transpose()?;
    Ok(Distance {
        relative: ratio(whole).unwrap_or_default(),
        of_update: update.and_then(ratio),
    })
}
