//! Parts of a tensor along a dimension.

use crate::base::error::{Result, shape_error};
use candle_core::Tensor;
use candle_core::shape::Dim;

const OP: &str = "split";

/// The parts of `x` of these lengths along `dim`, in order, as views: what `narrow` for each of them gives, differentiable.
///
/// The gradient of each `narrow` is a tensor of the size of its whole argument, so that the time of a backward pass through n of them
/// grows with the square of n. Here `x` is split in halves, and these again: it grows with n log n.
///
/// # Shapes
/// `x` `[.., sum of lengths, ..]` of any dtype; results `[.., length, ..]`.
///
/// # Errors
/// If the lengths do not add up to the dimension, or `x` does not have it.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f32, 2., 3.], &Device::Cpu)?;
/// let parts = fp8_candle::ops::split(&x, 0, &[2, 1])?;
/// assert_eq!(parts[1].to_vec1::<f32>()?, [3.]);
/// let grads = fp8_candle::wide::backward(&(parts[0].sum_all()? - parts[1].sum_all()?)?)?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [1., 1., -1.]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn split<D: Dim>(x: &Tensor, dim: D, lengths: &[usize]) -> Result<Vec<Tensor>> {
    let dim = dim.to_index(x.shape(), OP)?;
    let total = (lengths.iter()).try_fold(0usize, |total, &length| total.checked_add(length));
    if total != Some(x.dim(dim)?) {
        let expected = format!("{lengths:?} along dimension {dim}");
        return Err(shape_error(OP, "x", expected, x.dims()));
    }
    let mut parts = Vec::with_capacity(lengths.len());
    halves(x, dim, lengths, &mut parts)?;
    Ok(parts)
}

/// Adds the parts of `x`, which they fill.
fn halves(x: &Tensor, dim: usize, lengths: &[usize], parts: &mut Vec<Tensor>) -> Result<()> {
    if lengths.len() < 2 {
        parts.extend(lengths.iter().map(|_| x.clone()));
        return Ok(());
    }
    let mut start = 0;
    let (first, second) = lengths.split_at(lengths.len() / 2);
    for half in [first, second] {
        let length = half.iter().sum();
        halves(&x.narrow(dim, start, length)?, dim, half, parts)?;
        start += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Var};
    use fp8_test_support::{flat64, wave};
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// [`split`] gives the values and gradients of one `narrow` for each part. Each part is multiplied by numbers of its own; only those
    /// of `used` are part of the loss.
    fn compare(x: &Tensor, dim: usize, lengths: &[usize], used: &[bool]) -> Result<()> {
        let x = Var::from_tensor(x)?;
        let narrows = || {
            let mut start = 0;
            let parts = lengths.iter().map(|&length| {
                start += length;
                x.narrow(dim, start - length, length)
            });
            parts.collect::<candle_core::Result<Vec<_>>>()
        };
        let run = |parts: Vec<Tensor>| -> Result<_> {
            let mut loss = Tensor::zeros((), x.dtype(), x.device())?;
            for (i, part) in parts.iter().enumerate().filter(|&(i, _)| used[i]) {
                let weights = wave(part.dims(), i).to_dtype(x.dtype())?;
                loss = (loss + (part.contiguous()? * weights)?.sum_all()?)?;
            }
            let gradient = || match loss.track_op() {
                true => Ok::<_, crate::Error>(loss.backward()?.get(&x).map(flat64)),
                false => Ok(None),
            };
            let values: Vec<_> = parts.iter().map(flat64).collect();
            // The graph serves twice.
            Ok((values, gradient()?, gradient()?))
        };
        let (ours, theirs) = (run(split(&x, dim, lengths)?)?, run(narrows()?)?);
        assert_eq!(ours, theirs, "{lengths:?} of {:?}, {used:?}", x.dims());
        Ok(())
    }

    proptest! {
        #[test]
        fn parts_and_gradients_are_those_of_narrow(
            parts in prop::collection::vec((0..5usize, prop::bool::weighted(0.8)), 1..12),
            dim in 0..3usize,
            transposed in any::<bool>(),
            dtype in prop::sample::select(vec![DType::F32, DType::F64, DType::BF16]),
        ) {
            let (lengths, used): (Vec<usize>, Vec<bool>) = parts.into_iter().unzip();
            let mut dims = [2, 3, 4];
            dims[dim] = lengths.iter().sum();
            let x = match transposed {
                true => {
                    let (a, b) = ((dim + 1) % 3, dim);
                    dims.swap(a, b);
                    wave(&dims, 1).transpose(a, b)?
                }
                false => wave(&dims, 1),
            };
            compare(&x.to_dtype(dtype)?, dim, &lengths, &used)?;
        }
    }

    /// Each `narrow` of the graph gives a gradient of the size of what it was taken from.
    #[test]
    fn gradients_of_many_parts_are_few_whole_tensors() -> Result<()> {
        let x = Var::zeros((300, 2), DType::F32, &Device::Cpu)?;
        let mut made = HashMap::new();
        for part in split(&x, 0, &[1; 300])? {
            for pair in part.sorted_nodes().windows(2) {
                made.insert(pair[0].id(), pair[1].elem_count());
            }
        }
        let whole = x.elem_count();
        let sum: usize = made.values().sum();
        assert!(sum >= whole && sum <= 2 * 9 * whole, "{sum} of {whole}");
        Ok(())
    }

    #[test]
    fn lengths_that_do_not_fill_the_dimension_are_errors() -> Result<()> {
        let x = Tensor::zeros((2, 5), DType::F32, &Device::Cpu)?;
        for lengths in [&[2, 2][..], &[6], &[]] {
            let error = split(&x, 1, lengths).expect_err("an error").to_string();
            assert!(
                error.contains("split: shape [2, 5] of x, expected [")
                    && error.contains("along dimension 1"),
                "{error}"
            );
        }
        let error = split(&x, 2, &[1]).expect_err("an error").to_string();
        assert!(error.contains("split: dimension index 2"), "{error}");
        Ok(())
    }

    #[test]
    fn lengths_beyond_all_numbers_are_an_error() {
        let x = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let error = split(&x, 0, &[usize::MAX, 3]).unwrap_err().to_string();
        assert!(error.contains("[18446744073709551615, 3]"), "{error}");
    }
}
