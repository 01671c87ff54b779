//! The bytes of a tensor.

use super::options::GgufType;
use super::plan::{BLOCK, BLOCK_BYTES, Content, Planned};
use crate::models::error::Result;
use crate::models::files::gguf::names::permute;
use crate::rewrite::Source;
use candle_core::{DType, Tensor};
use fp8_files::atomic::FileError;
use half::{bf16, f16};
use rayon::prelude::*;
use std::io::Write;
use std::path::Path;

/// Elements that are encoded at a time: whole blocks.
const CHUNK: usize = 1 << 22;

/// Writes the bytes of a tensor; `path` is for messages. One part of it is in memory at a time.
pub(super) fn write(
    writer: &mut dyn Write,
    path: &Path,
    tensor: &Planned,
    source: &dyn Source,
) -> Result<()> {
    let mut write = |bytes: &[u8]| -> Result<()> {
        let written = writer.write_all(bytes);
        Ok(written
            .map_err(FileError::io(path, "write"))
            .map_err(fp8_files::Error::from)?)
    };
    match &tensor.content {
        Content::Values(values) => write(&of_f32(values)),
        Content::Parts { names, heads } => {
            for name in names {
                let value = value(source, name, tensor.stored, *heads)?;
                let value = value.flatten_all()?;
                let count = value.elem_count();
                for start in (0..count).step_by(CHUNK) {
                    let chunk = value.narrow(0, start, CHUNK.min(count - start))?;
                    check(&chunk, start, name, tensor.stored)?;
                    write(&bytes(&chunk, tensor.stored)?)?;
                }
            }
            Ok(())
        }
    }
}

/// A tensor of the source with the rows in the file's order, in the dtype that it is encoded from.
fn value(
    source: &dyn Source,
    name: &str,
    stored: GgufType,
    heads: Option<usize>,
) -> Result<Tensor> {
    let dtype = match stored {
        GgufType::F16 => DType::F16,
        GgufType::BF16 => DType::BF16,
        GgufType::F32 | GgufType::Q8_0 => DType::F32,
    };
    let value = source.value(name, dtype)?;
    Ok(match heads {
        Some(heads) => permute(&value, heads)?,
        None => value,
    })
}

/// Checks that the file can hold all values of a chunk, whose first has the index `start`.
fn check(chunk: &Tensor, start: usize, name: &str, stored: GgufType) -> Result<()> {
    let (most, expected) = match stored {
        // The scale of a block is f16.
        GgufType::Q8_0 => (f64::from(f16::MAX) * 127., "within the scales of Q8_0"),
        GgufType::F16 => (f64::MAX, "finite in f16 (bf16 holds larger numbers)"),
        GgufType::F32 | GgufType::BF16 => (f64::MAX, "finite, as a weight has to be"),
    };
    match fp8_files::first_outside(chunk, |x| x.abs() <= most)? {
        None => Ok(()),
        Some((index, value)) => Err(fp8_files::Error::TensorValue {
            tensor: name.to_string(),
            index: start + index,
            value,
            expected: expected.into(),
        }
        .into()),
    }
}

fn of_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn bytes(chunk: &Tensor, stored: GgufType) -> candle_core::Result<Vec<u8>> {
    Ok(match stored {
        GgufType::F32 => of_f32(&chunk.to_vec1()?),
        GgufType::F16 => {
            let values = chunk.to_vec1::<f16>()?;
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        GgufType::BF16 => {
            let values = chunk.to_vec1::<bf16>()?;
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        GgufType::Q8_0 => {
            let values = chunk.to_vec1::<f32>()?;
            let mut bytes = vec![0; values.len() / BLOCK * BLOCK_BYTES];
            let blocks = values.par_chunks(BLOCK);
            let blocks = blocks.zip(bytes.par_chunks_mut(BLOCK_BYTES));
            blocks.for_each(|(values, bytes)| q8_0(values, bytes));
            bytes
        }
    })
}

/// A block by llama.cpp's rule: d = amax / 127; the codes are x * (1 / d), rounded half away from zero, where d is still f32; it is
/// stored in f16.
///
/// candle has the same rule, but on aarch64 its own kernel.
fn q8_0(values: &[f32], bytes: &mut [u8]) {
    let amax = values.iter().fold(0f32, |amax, x| amax.max(x.abs()));
    let d = amax / 127.;
    let inverse = match 1. / d {
        // Such a d is 0 in f16, and so is every value: codes of 0 say the same.
        inverse if inverse.is_infinite() => 0.,
        inverse => inverse,
    };
    let (scale, codes) = bytes.split_at_mut(2);
    scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
    for (code, x) in codes.iter_mut().zip(values) {
        *code = (x * inverse).round() as i8 as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(values: &[f32]) -> (f16, Vec<i8>) {
        let mut padded = vec![0.; BLOCK];
        padded[..values.len()].copy_from_slice(values);
        let mut bytes = [0xAA; BLOCK_BYTES];
        q8_0(&padded, &mut bytes);
        let codes = bytes[2..].iter().map(|code| *code as i8).collect();
        (f16::from_le_bytes([bytes[0], bytes[1]]), codes)
    }

    #[test]
    fn ties_round_away_from_zero_and_nothing_overflows() {
        // d is 1: the values are codes.
        let (d, codes) = block(&[127., 0.5, -0.5, 2.5, -2.5, 126.5, -126.5, 0.49999997]);
        assert_eq!(d, f16::ONE);
        assert_eq!(codes[..8], [127, 1, -1, 3, -3, 127, -127, 0]);
        for zero in [0f32, -0., 1e-45, 1e-40, f32::MIN_POSITIVE] {
            let (d, codes) = block(&[zero, -zero]);
            assert_eq!(f32::from(d), 0.);
            assert!(codes.iter().all(|code| *code == 0), "{zero}: {codes:?}");
        }
        // 1 / d is not infinite from here on, and codes have full size although d is 0 in f16.
        let (d, codes) = block(&[1e-30, -1e-30]);
        assert_eq!((f32::from(d), codes[0], codes[1]), (0., 127, -127));
    }
}
