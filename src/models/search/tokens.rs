//! How much each token of the samples counts.
//!
//! A block adds to a residual, which the next block divides by its norm. So an error of what is added matters less at a token with a large
//! residual. In many models a few tokens, the first above all, have residuals a hundred times as large as others: counted as the others,
//! they would be most of a sum of squares, and nearly all that codes are chosen for.

use crate::models::error::Result;
use candle_core::{D, DType, Tensor};

/// The smallest residual that is told apart, as a part of the median of squares: tokens with smaller ones count as those.
const LEAST: f32 = 0.1;

/// Factors for the inputs of the layers that add to a residual, given that residual with all that its block has added, for each sample:
/// `[tokens, 1]` each. A token's squares then count in inverse proportion to the square of its residual.
pub(super) fn factors(residuals: &[Tensor]) -> Result<Vec<Tensor>> {
    let squares = residuals.iter().map(|x| {
        let x = in_rows(x)?;
        Ok(x.sqr()?.mean(D::Minus1)?.to_vec1::<f32>()?)
    });
    let squares = squares.collect::<Result<Vec<_>>>()?;
    let mut all: Vec<f32> = squares.iter().flatten().copied().collect();
    let middle = all.len() / 2;
    let median = match all.is_empty() {
        true => 0.,
        false => *all.select_nth_unstable_by(middle, f32::total_cmp).1,
    };
    let factor = |square: &f32| {
        let share = square / median;
        match share.is_finite() {
            true => share.max(LEAST).sqrt().recip(),
            // The residuals are zero, or not finite, which the products show.
            false => 1.,
        }
    };
    let factors = squares.iter().zip(residuals).map(|(squares, x)| {
        let factors: Vec<f32> = squares.iter().map(factor).collect();
        Ok(Tensor::from_vec(factors, (squares.len(), 1), x.device())?)
    });
    factors.collect()
}

/// Inputs, with each token's multiplied by its factor: `[tokens, features]` in f32.
pub(super) fn counted(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    Ok(in_rows(x)?.broadcast_mul(factors)?)
}

/// `[tokens, features]` in f32.
fn in_rows(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_dtype(DType::F32)?.reshape(((), x.dim(D::Minus1)?))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use fp8_core::Granularity;
    use fp8_files::search::{InputProducts, PreparedInputs, SearchOptions, search_weight};
    use proptest::prelude::*;

    fn values(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    proptest! {
        #[test]
        fn squares_count_in_inverse_proportion_to_those_of_residuals(
            sizes in prop::collection::vec(0.4f32..1000., 1..20),
            common in -20i32..20,
        ) {
            // A third of the tokens have the size 1, or more, so that it is the median.
            let ones = sizes.len() + 1;
            let all: Vec<f32> = sizes.iter().copied().chain(vec![1.; ones]).collect();
            let residuals = |tokens: &[f32]| {
                let rows = tokens.iter().flat_map(|size| [*size * (common as f32).exp2(); 3]);
                Tensor::from_iter(rows, &Device::Cpu).unwrap().reshape((1, tokens.len(), 3)).unwrap()
            };
            let found = factors(&[residuals(&all)]).unwrap();
            prop_assert_eq!(found[0].dims(), [all.len(), 1]);
            for (factor, size) in values(&found[0]).into_iter().zip(&all) {
                prop_assert!((factor * size - 1.).abs() < 1e-4, "{} {}", factor, size);
            }
            // A token counts the same whatever sample it is in.
            let (a, b) = all.split_at(1);
            let parts = factors(&[residuals(a), residuals(b)]).unwrap();
            prop_assert_eq!(values(&Tensor::cat(&parts, 0).unwrap()), values(&found[0]));
        }
    }

    #[test]
    fn residuals_without_a_size_have_finite_factors() {
        let x = Tensor::new(&[[[0f32, 0.], [1., 1.], [1., 1.]]], &Device::Cpu).unwrap();
        let found = values(&factors(std::slice::from_ref(&x)).unwrap()[0]);
        assert_eq!(found[1..], [1., 1.]);
        assert!((found[0] - 10f32.sqrt()).abs() < 1e-5, "{found:?}");
        for x in [(&x * 0.).unwrap(), (&x / 0.).unwrap()] {
            let found = values(&factors(&[x]).unwrap()[0]);
            assert!(found.iter().all(|factor| factor.is_finite()), "{found:?}");
        }
        assert!(factors(&[]).unwrap().is_empty());
    }

    #[test]
    fn a_token_with_a_huge_residual_does_not_decide_for_the_others() {
        let (tokens, features, outputs) = (256, 32, 16);
        let number =
            |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608. - 1.;
        let tensor = |from: usize, rows: usize| {
            let values = (from..from + rows * features).map(number);
            let x = Tensor::from_iter(values, &Device::Cpu).unwrap();
            x.reshape((rows, features)).unwrap()
        };
        let mixed = tensor(0, features);
        let (ordinary, weight) = (tensor(7000, tokens), tensor(90_000, outputs));
        let ordinary = ordinary.matmul(&mixed).unwrap();
        let huge = (tensor(50_000, 1) * 1000.).unwrap();
        let x = Tensor::cat(&[&ordinary, &huge], 0).unwrap();
        let error = |x: &Tensor| {
            let mut products = InputProducts::new(features).unwrap();
            products.add(x, x).unwrap();
            let options = SearchOptions::new();
            let inputs = PreparedInputs::new(&products, &options, "fc").unwrap();
            let found = search_weight(&weight, Granularity::Rowwise, &inputs, "fc").unwrap();
            let codes = found.codes.dequantize(DType::F32).unwrap();
            let missing = (codes - &weight).unwrap().t().unwrap();
            let outputs = ordinary.matmul(&missing).unwrap().sqr().unwrap();
            outputs.sum_all().unwrap().to_scalar::<f32>().unwrap()
        };
        let factors = factors(std::slice::from_ref(&x)).unwrap();
        let (with, without) = (error(&counted(&x, &factors[0]).unwrap()), error(&x));
        assert!(with < 0.8 * without, "{with} {without}");
    }
}
