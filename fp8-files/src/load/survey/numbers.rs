//! The numbers of a tensor from its bytes.

use fp8_core::{E8M0, Format};
use half::{bf16, f16};
use safetensors::Dtype;

/// The numbers that `bytes` hold; None for a dtype that no scale or weight has. Bytes of scales encode powers of two.
pub(crate) fn numbers(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    fn each<const SIZE: usize>(bytes: &[u8], number: impl Fn([u8; SIZE]) -> f32) -> Vec<f32> {
        let (elements, _) = bytes.as_chunks::<SIZE>();
        elements.iter().map(|bytes| number(*bytes)).collect()
    }
    Some(match dtype {
        Dtype::F32 => each(bytes, f32::from_le_bytes),
        Dtype::BF16 => each(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F16 => each(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::F64 => each(bytes, |bytes| f64::from_le_bytes(bytes) as f32),
        Dtype::U8 | Dtype::F8_E8M0 => each(bytes, |[byte]| E8M0::from_bits(byte).to_f32()),
        Dtype::F8_E4M3 => each(bytes, |[code]| Format::E4M3.decode(code)),
        _ => return None,
    })
}
