//! Chooses a few experts for each token.

use super::{ExpertGroups, MoeConfig, RouterScores};
use crate::models::error::Result;
use crate::models::layers::is_few;
use crate::nn::{NamedTensor, VarBuilder};
use candle_core::{D, DType, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// The weights that score experts. They stay in high precision.
#[derive(Debug, Clone, Fp8Module)]
pub(super) struct Router {
    weight: NamedTensor,
    /// What the choice adds to scores.
    correction: Option<NamedTensor>,
    #[fp8(skip)]
    config: MoeConfig,
}

/// The experts of each row of a batch.
pub(super) struct Chosen {
    /// Indexes of experts.
    pub(super) experts: Vec<Vec<u32>>,
    /// Their weights, `[rows, experts per token]`, part of the graph.
    pub(super) weights: Tensor,
}

impl Router {
    /// Loads `weight` from `gate`.
    pub(super) fn new(hidden: usize, config: &MoeConfig, gate: &VarBuilder<'_>) -> Result<Self> {
        let weight = gate.get((config.num_experts, hidden), "weight")?;
        let named =
            |own: &str, tensor| NamedTensor::new(format!("{}.{own}", gate.prefix()), tensor);
        let correction = match config.routing.scores {
            RouterScores::Softmax => None,
            RouterScores::Sigmoid => {
                const OWN: &str = "e_score_correction_bias";
                // Scores differ by less than what 16 bits can tell apart.
                let zero = candle_nn::Init::Const(0.);
                let bias = gate.get_with_hints_dtype(config.num_experts, OWN, zero, DType::F32)?;
                Some(named(OWN, bias))
            }
        };
        Ok(Self {
            weight: named("weight", weight),
            correction,
            config: config.clone(),
        })
    }

    /// The weights that are multiplied with the inputs.
    pub(super) fn weight(&mut self) -> &mut NamedTensor {
        &mut self.weight
    }

    /// Takes the gradient from the weights.
    pub(super) fn freeze(&mut self) {
        for tensor in [Some(&mut self.weight), self.correction.as_mut()]
            .into_iter()
            .flatten()
        {
            *tensor = NamedTensor::new(tensor.path(), tensor.tensor().detach());
        }
    }

    /// `x` times the weights, in the dtype of `x`.
    fn product(&self, x: &Tensor) -> Result<Tensor> {
        let router = self.weight.tensor().to_dtype(x.dtype())?;
        match is_few(x) && !router.track_op() {
            true => Ok(ops::few_rows_linear(x, &router)?),
            false => Ok(x.matmul(&router.t()?)?),
        }
    }

    /// x: `[rows, hidden]`.
    pub(super) fn choose(&self, x: &Tensor) -> Result<Chosen> {
        let routing = self.config.routing;
        let scores = match routing.scores {
            RouterScores::Softmax => {
                let logits = self.product(x)?.to_dtype(DType::F32)?;
                ops::softmax_last_dim(&logits)?
            }
            RouterScores::Sigmoid => {
                candle_nn::ops::sigmoid(&self.product(&x.to_dtype(DType::F32)?)?)?
            }
        };
        let mut choice = scores.detach();
        if let Some(correction) = &self.correction {
            choice = choice.broadcast_add(&correction.tensor().detach())?;
        }
        let mut choice = choice.to_vec2::<f32>()?;
        if let Some(groups) = routing.groups {
            choice.iter_mut().for_each(|row| keep_groups(row, groups));
        }
        let per_token = self.config.experts_per_token;
        let experts: Vec<Vec<u32>> = choice.iter().map(|row| largest(row, per_token)).collect();
        let flat: Vec<u32> = experts.iter().flatten().copied().collect();
        let indexes = Tensor::from_vec(flat, (experts.len(), per_token), x.device())?;
        let mut weights = scores.gather(&indexes, D::Minus1)?;
        if self.config.normalize {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        if routing.scaling != 1. {
            weights = (weights * routing.scaling)?;
        }
        Ok(Chosen { experts, weights })
    }
}

/// Lowers the scores of all experts outside of the best groups to -Inf.
fn keep_groups(scores: &mut [f32], groups: ExpertGroups) {
    let size = scores.len() / groups.count;
    let score = |group: &[f32]| -> f32 {
        let best = largest(group, groups.best).into_iter();
        best.map(|at| group[at as usize]).sum()
    };
    let of_groups: Vec<f32> = scores.chunks(size).map(score).collect();
    let kept = largest(&of_groups, groups.chosen);
    for (at, group) in scores.chunks_mut(size).enumerate() {
        if !kept.contains(&(at as u32)) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Indexes of the `count` largest values, in descending order; equal values in order of index. NaN counts as the smallest.
fn largest(values: &[f32], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let key = |i: &u32| {
        let value = values[*i as usize];
        if value.is_nan() {
            f32::NEG_INFINITY
        } else {
            value
        }
    };
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::{ExpertGroups, keep_groups, largest};

    #[test]
    fn the_largest_come_first() {
        assert_eq!(largest(&[0.1, 0.5, f32::NAN, 0.5], 3), [1, 3, 0]);
        assert_eq!(largest(&[0.1], 1), [0]);
    }

    #[test]
    fn groups_count_by_their_best() {
        let scores = [0.9, 0., 0.5, 0.5, 0.1, 0.2];
        let kept = |best| {
            let (mut scores, groups) = (
                scores,
                ExpertGroups {
                    count: 3,
                    chosen: 1,
                    best,
                },
            );
            keep_groups(&mut scores, groups);
            scores.map(|score| score > f32::NEG_INFINITY)
        };
        assert_eq!(kept(1), [true, true, false, false, false, false]);
        assert_eq!(kept(2), [false, false, true, true, false, false]);
    }
}
