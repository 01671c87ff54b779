//! The choice of one token from its logits.

use super::options::GenerationOptions;
use crate::models::error::{Result, TextError};
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candle_transformers::utils::apply_repeat_penalty;

/// Chooses the tokens of one row.
pub(super) struct Sampler {
    /// None: always the likeliest token.
    draws: Option<LogitsProcessor>,
    /// Top-k beside top-p, applied here before `draws`.
    among: Option<usize>,
    penalty: f32,
    window: Option<usize>,
}

impl Sampler {
    /// A sampler for row `row` of a batch; `options` must have passed their check.
    pub(super) fn new(options: &GenerationOptions, row: usize) -> Self {
        let temperature = options.temperature;
        let draws = options.draws().then(|| {
            let sampling = match (options.top_k, options.top_p) {
                (None, None) => Sampling::All { temperature },
                (Some(k), None) => Sampling::TopK { k, temperature },
                (_, Some(p)) => Sampling::TopP { p, temperature },
            };
            LogitsProcessor::from_sampling(options.seed.wrapping_add(row as u64), sampling)
        });
        Self {
            draws,
            // As in transformers, top-p is a share of the tokens that top-k has left; candle's own combination takes it of all tokens.
            among: options.top_k.filter(|_| options.top_p.is_some()),
            penalty: options.repetition_penalty,
            window: options.repetition_window,
        }
    }

    /// Chooses the token after `before`, the tokens of the row so far. `row` is for messages.
    pub(super) fn choose(&mut self, logits: Vec<f32>, before: &[u32], row: usize) -> Result<u32> {
        let wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let no_choice = logits.iter().all(|x| *x == f32::NEG_INFINITY);
        if let Some(token) = logits.iter().position(|x| wrong(x) || no_choice) {
            return Err(TextError::NotFinite {
                prompt: row,
                token,
                value: logits[token],
                position: before.len(),
            }
            .into());
        }
        let penalized = self.penalty != 1.0;
        if !penalized && self.draws.is_none() {
            return Ok(likeliest(&logits));
        }
        let count = logits.len();
        let mut logits = Tensor::from_vec(logits, count, &Device::Cpu)?;
        if penalized {
            let window = self.window.unwrap_or(before.len()).min(before.len());
            let context = &before[before.len() - window..];
            logits = apply_repeat_penalty(&logits, self.penalty, context)?;
        }
        match &mut self.draws {
            Some(draws) => {
                if let Some(k) = self.among.filter(|&k| k < count) {
                    let largest = only_largest(logits.to_vec1()?, k);
                    logits = Tensor::from_vec(largest, count, &Device::Cpu)?;
                }
                Ok(draws.sample(&logits)?)
            }
            None => Ok(likeliest(&logits.to_vec1()?)),
        }
    }
}

/// Index of the largest value, the first of equal ones.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// The `k` largest logits, of equal ones the first; all others become minus infinity. There are more than `k`.
fn only_largest(mut logits: Vec<f32>, k: usize) -> Vec<f32> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.select_nth_unstable_by(k, |&a, &b| {
        let by_size = logits[b].total_cmp(&logits[a]);
        by_size.then(a.cmp(&b))
    });
    for &token in &order[k..] {
        logits[token] = f32::NEG_INFINITY;
    }
    logits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Error;

    fn choose(options: &GenerationOptions, logits: &[f32], before: &[u32]) -> Result<u32> {
        Sampler::new(options, 0).choose(logits.to_vec(), before, 0)
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() -> Result<()> {
        let options = GenerationOptions::default();
        assert_eq!(choose(&options, &[0.0, 2.0, 2.0, -1.0], &[0])?, 1);
        assert_eq!(choose(&options, &[f32::NEG_INFINITY, -3.0], &[0])?, 1);
        Ok(())
    }

    #[test]
    fn the_penalty_counts_the_window_only() -> Result<()> {
        let logits = [1.0, 1.5, -1.0];
        let all = GenerationOptions::default().with_repetition_penalty(2.0, None);
        assert_eq!(choose(&all, &logits, &[1, 2])?, 0);
        let last = GenerationOptions::default().with_repetition_penalty(2.0, Some(1));
        assert_eq!(choose(&last, &logits, &[1, 2])?, 1);
        let none = GenerationOptions::default().with_repetition_penalty(2.0, Some(0));
        assert_eq!(choose(&none, &logits, &[1, 2])?, 1);
        let far = GenerationOptions::default().with_repetition_penalty(2.0, Some(99));
        assert_eq!(choose(&far, &logits, &[1, 2])?, 0);
        Ok(())
    }

    /// How often each of four tokens is drawn.
    fn counts(options: &GenerationOptions, logits: &[f32]) -> Result<Vec<usize>> {
        let mut sampler = Sampler::new(options, 0);
        let mut counts = vec![0; logits.len()];
        for _ in 0..4000 {
            counts[sampler.choose(logits.to_vec(), &[0], 0)? as usize] += 1;
        }
        Ok(counts)
    }

    #[test]
    fn draws_follow_the_probabilities_within_top_k_and_top_p() -> Result<()> {
        // Probabilities .1, .2, .3, .4.
        let logits: Vec<f32> = [1.0f32, 2.0, 3.0, 4.0].map(f32::ln).to_vec();
        let sampled = GenerationOptions::default().with_temperature(1.0);
        let near = |counts: &[usize], expected: &[f64]| {
            for (count, p) in counts.iter().zip(expected) {
                // Six standard deviations of a binomial count.
                let bound = 6.0 * (4000.0 * p * (1.0 - p)).sqrt();
                assert!((*count as f64 - 4000.0 * p).abs() <= bound, "{counts:?}");
            }
        };
        near(&counts(&sampled, &logits)?, &[0.1, 0.2, 0.3, 0.4]);
        let top_k = sampled.clone().with_top_k(Some(2));
        near(&counts(&top_k, &logits)?, &[0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        let top_p = sampled.clone().with_top_p(Some(0.85));
        near(
            &counts(&top_p, &logits)?,
            &[0.0, 2.0 / 9.0, 3.0 / 9.0, 4.0 / 9.0],
        );
        let cold = sampled.clone().with_temperature(0.5);
        near(
            &counts(&cold, &logits)?,
            &[1.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0, 16.0 / 30.0],
        );
        // Of the two that top-k leaves, the likeliest has more than half: top-p is a share of these, not of all.
        let both = sampled.clone().with_top_k(Some(2)).with_top_p(Some(0.5));
        near(&counts(&both, &logits)?, &[0.0, 0.0, 0.0, 1.0]);
        let wide = sampled.clone().with_top_k(Some(3)).with_top_p(Some(0.7));
        near(&counts(&wide, &logits)?, &[0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        let one = sampled.with_top_k(Some(1));
        near(&counts(&one, &logits)?, &[0.0, 0.0, 0.0, 1.0]);
        Ok(())
    }

    #[test]
    fn of_equal_logits_the_first_are_kept() {
        let infinite = f32::NEG_INFINITY;
        let kept = only_largest(vec![1.0, 2.0, 1.0, 2.0, 1.0], 3);
        assert_eq!(kept, [1.0, 2.0, infinite, 2.0, infinite]);
    }

    #[test]
    fn the_same_seed_draws_the_same() -> Result<()> {
        let options = GenerationOptions::default().with_temperature(1.0);
        let draw = |seed: u64, row| -> Result<Vec<u32>> {
            let mut sampler = Sampler::new(&options.clone().with_seed(seed), row);
            (0..50)
                .map(|_| sampler.choose(vec![0.0; 100], &[0], 0))
                .collect()
        };
        assert_eq!(draw(3, 0)?, draw(3, 0)?);
        assert_ne!(draw(3, 0)?, draw(4, 0)?);
        assert_eq!(draw(3, 1)?, draw(4, 0)?);
        Ok(())
    }

    #[test]
    fn logits_that_allow_no_choice_are_refused() {
        let infinite = f32::INFINITY;
        for logits in [[0.0, f32::NAN], [0.0, infinite], [-infinite, -infinite]] {
            let result = choose(&GenerationOptions::default(), &logits, &[4, 5]);
            let Err(Error::Text(TextError::NotFinite { position, .. })) = result else {
                panic!("{logits:?}: {result:?}");
            };
            assert_eq!(position, 2);
        }
    }
}
