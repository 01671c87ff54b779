//! Which dimensions of an input a dense layer contracts, keeps, and shares with its kernel.

use crate::error::{DenseError, Error, Result};

/// The dimensions of an input, each list in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Axes {
    /// Those that the kernel has as well: each index has a product of its own.
    pub(super) batch: Vec<usize>,
    /// Those that are summed over.
    pub(super) contracted: Vec<usize>,
    /// All others.
    pub(super) rest: Vec<usize>,
}

impl Axes {
    /// The dimensions of an input of this shape. Axes count from the first dimension, negative ones from the last. As in flax their
    /// order means nothing: the kernel has them in the order of the input.
    pub(super) fn of(
        path: &str,
        shape: &[usize],
        axis: &[isize],
        batch_axis: &[isize],
    ) -> Result<Self> {
        let refused = |what, axes: &[isize], expected: &str| -> Error {
            let (axes, shape) = (axes.to_vec(), shape.to_vec());
            DenseError::Axes {
                path: path.to_string(),
                what,
                axes,
                shape,
                expected: expected.to_string(),
            }
            .into()
        };
        let positions = |what, axes: &[isize]| {
            let rank = shape.len() as isize;
            let mut found = vec![];
            for &axis in axes {
                let at = if axis < 0 {
                    axis.checked_add(rank)
                } else {
                    Some(axis)
                };
                match at.filter(|at| (0..rank).contains(at)) {
                    Some(at) => found.push(at as usize),
                    None => {
                        let expected = format!("which has no axis {axis}");
                        return Err(refused(what, axes, &expected));
                    }
                }
            }
            found.sort_unstable();
            match found.windows(2).any(|pair| pair[0] == pair[1]) {
                true => Err(refused(what, axes, "which name one of its axes twice")),
                false => Ok(found),
            }
        };
        let contracted = positions("axis", axis)?;
        let batch = positions("batch_axis", batch_axis)?;
        if batch.iter().any(|at| contracted.contains(at)) {
            let expected = format!("which `axis` {axis:?} names too");
            return Err(refused("batch_axis", batch_axis, &expected));
        }
        let rest = (0..shape.len()).filter(|at| !batch.contains(at) && !contracted.contains(at));
        let rest = rest.collect();
        Ok(Self {
            batch,
            contracted,
            rest,
        })
    }

    /// Batch, other, then contracted dimensions: the order in which the input is a stack of matrices.
    pub(super) fn order(&self) -> Vec<usize> {
        [&*self.batch, &*self.rest, &*self.contracted].concat()
    }
}

/// The sizes of these dimensions.
pub(super) fn sizes(shape: &[usize], axes: &[usize]) -> Vec<usize> {
    axes.iter().map(|&at| shape[at]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_sorted_and_negative_ones_count_from_the_end() -> Result<()> {
        let axes = Axes::of("fc", &[2, 3, 4, 5, 6], &[-1, 1], &[3])?;
        assert_eq!(axes.contracted, [1, 4]);
        assert_eq!((&*axes.batch, &*axes.rest), (&[3][..], &[0, 2][..]));
        assert_eq!(axes.order(), [3, 0, 2, 1, 4]);
        Ok(())
    }

    #[test]
    fn axes_that_an_input_does_not_have_are_refused() {
        for (axis, batch_axis) in [
            (vec![3], vec![]),
            (vec![-4], vec![]),
            (vec![0], vec![isize::MIN]),
        ] {
            let text = Axes::of("fc", &[2, 3, 4], &axis, &batch_axis);
            let text = text.expect_err("no such axis").to_string();
            assert!(
                text.contains("`fc`") && text.contains("has no axis"),
                "{text}"
            );
        }
        for (axis, batch_axis, reason) in [
            (vec![2, -1], vec![], "one of its axes twice"),
            (vec![1], vec![1], "which `axis` [1] names too"),
        ] {
            let text = Axes::of("fc", &[2, 3, 4], &axis, &batch_axis);
            let text = text.expect_err("one axis for two uses").to_string();
            assert!(text.contains(reason), "{text}");
        }
    }
}
