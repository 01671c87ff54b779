//! A product of made operands, by which algorithms are compared. The first operands of a program may be zeros, as gradients through
//! layers that begin with zeros are: of those every order of adding makes the same sum.

use super::gpu::{Buffer, Gpu};
use super::kernels::{Shape, args, kernels};
use super::launch::launch;
use super::product::{Element, Operand, Product, ScaleMode};
use crate::base::error::Result;
use candle_core::DType;

kernels! { TRIAL_KERNELS in TRIAL;
    WORDS = one "fp8_trial_words"("pliii");
    DIFFER = one "fp8_differ"("pppl");
}

/// A product with the sizes, types and scale modes of another, of operands of its own.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) product: Product,
    /// Memory of the operands, scales and bias.
    _made: Vec<Buffer>,
}

impl Trial {
    /// The result goes where that of `product` does. Values have random signs and exponents, scales are 1, the bias is 0.
    pub(super) fn new(gpu: &Gpu, product: &Product) -> Result<Self> {
        let mut made = vec![];
        let mut words = |bytes: usize, seed: u32, mask: u32, set: u32| -> Result<u64> {
            let buffer = words(gpu, bytes.div_ceil(4), seed, mask, set)?;
            let ptr = buffer.ptr();
            made.push(buffer);
            Ok(ptr)
        };
        let mut operand = |operand: &Operand, seed: u32| -> Result<Operand> {
            let values = operand.kept * product.contracted;
            let codes = match operand.element {
                // Without the highest bit of the exponent there is no NaN, and magnitudes are less than 2.
                Element::Fp8(_) => words(values, seed, 0xBFBF_BFBF, 0)?,
                // Exponents of 2^-7 to 2^0.
                Element::Bf16 => words(2 * values, seed, 0x83FF_83FF, 0x3C00_3C00)?,
            };
            let one = match operand.mode {
                ScaleMode::Mx32 => 0x7F7F_7F7F,
                _ => 1f32.to_bits(),
            };
            let dequant_scale = words(most_scale_bytes(operand, product.contracted), 0, 0, one)?;
            Ok(Operand {
                codes,
                dequant_scale,
                ..*operand
            })
        };
        let (a, b) = (operand(&product.a, 1)?, operand(&product.b, 1 << 31)?);
        let bias = match product.bias {
            0 => 0,
            _ => words(product.b.kept * product.dtype.size_in_bytes(), 0, 0, 0)?,
        };
        let product = Product {
            a,
            b,
            bias,
            ..*product
        };
        Ok(Self {
            product,
            _made: made,
        })
    }
}

/// At least the bytes of the scales of an operand in any mode: of four along 128 values of a sum for each kept index, in whole
/// tiles, one byte each (1x32) or one of them as f32 (1x128); the other modes have fewer.
fn most_scale_bytes(operand: &Operand, contracted: usize) -> usize {
    operand.kept.next_multiple_of(128) * 4 * contracted.div_ceil(128)
}

fn words(gpu: &Gpu, words: usize, seed: u32, mask: u32, set: u32) -> Result<Buffer> {
    let buffer = gpu.alloc(DType::U32, words)?;
    let args = args![p buffer.ptr(), l words, i seed, i mask, i set];
    // SAFETY: the buffer has this many words.
    unsafe { launch(gpu, &WORDS, Shape::stride(words.div_ceil(4)), &args)? };
    Ok(buffer)
}

/// Whether `len` bytes at two addresses are different. Waits for the stream.
///
/// # Safety
/// The addresses must be of `len` bytes of `gpu`'s memory each, aligned to 4.
pub(super) unsafe fn differ(gpu: &Gpu, a: u64, b: u64, len: usize) -> Result<bool> {
    let found = gpu.zeros(DType::U32, 1)?;
    let args = args![p a, p b, p found.ptr(), l len];
    // SAFETY: the caller's bytes, and a number.
    unsafe { launch(gpu, &DIFFER, Shape::stride(len.div_ceil(16)), &args)? };
    Ok(found.into_tensor(1)?.to_vec1::<u32>()? != [0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::Format;

    /// Every value is finite, nearly all are different from zero, and those of two seeds differ.
    #[test]
    fn made_operands_are_numbers_of_many_magnitudes() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        let gpu = Gpu::new(&device)?;
        let made = |seed, mask, set| -> Result<Vec<u32>> {
            Ok(words(&gpu, 1000, seed, mask, set)?
                .into_tensor(1000)?
                .to_vec1()?)
        };
        let codes = made(1, 0xBFBF_BFBF, 0)?;
        assert_ne!(codes, made(1 << 31, 0xBFBF_BFBF, 0)?);
        for format in [Format::E4M3, Format::E5M2] {
            let values = codes.iter().flat_map(|word| word.to_le_bytes());
            let values: Vec<f32> = values.map(|code| format.decode(code)).collect();
            assert!(values.iter().all(|value| value.abs() < 2.), "{format}");
            let of = |test: fn(&f32) -> bool| values.iter().filter(|value| test(value)).count();
            assert!(of(|&value| value != 0.) > 3900, "{format}");
            assert!(of(|&value| value < 0.) > 1500, "{format}");
            assert!(of(|&value| value.abs() >= 1.) > 100, "{format}");
        }
        for word in made(1, 0x83FF_83FF, 0x3C00_3C00)? {
            for half in [word << 16, word & 0xFFFF_0000] {
                let value = f32::from_bits(half).abs();
                assert!((0.0078125..2.).contains(&value), "{value}");
            }
        }
        assert_eq!(made(0, 0, 1f32.to_bits())?, [1f32.to_bits(); 1000]);
        Ok(())
    }
}
