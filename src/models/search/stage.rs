//! Layers of a block that read the same input, and the search of their codes.

use super::task::Task;
use super::tokens::counted;
use crate::models::error::Result;
use crate::rewrite::QuantizeOptions;
use candle_core::{D, DType, Tensor};
use fp8_candle::InputScaling;
use fp8_files::search::{
    InputProducts, PreparedInputs, Searched, inverse_shift, search_weight, shifted,
};
use std::collections::BTreeMap;

/// Layers that read the same input.
pub(super) struct Stage {
    pub(super) paths: Vec<String>,
    /// This input in high precision, for each sample; None where no token of the sample reaches the layers.
    pub(super) meant: Vec<Option<Tensor>>,
}

impl Stage {
    pub(super) fn first(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }

    /// Whether a router decides which tokens the layers get, which may differ from those in high precision.
    pub(super) fn is_routed(&self) -> bool {
        self.first().contains(".experts.")
    }

    /// The layer's own name.
    pub(super) fn name(&self) -> &str {
        self.first().rsplit('.').next().unwrap_or_default()
    }
}

/// A stage with the inputs that reach it, and its weights in high precision.
pub(super) struct Fed<'a> {
    pub(super) stage: &'a Stage,
    /// For each sample that reaches it: the inputs as served, before their cast, and those in high precision.
    pub(super) inputs: Vec<(Tensor, Tensor)>,
    /// For each of these samples: factors of its tokens, as of [`factors`](super::tokens::factors). Empty if all tokens count the same.
    pub(super) factors: Vec<Tensor>,
    /// In the order of the stage's paths.
    pub(super) weights: Vec<Tensor>,
}

/// What was found for a layer.
pub(super) struct Tried {
    pub(super) path: String,
    pub(super) searched: Searched,
    pub(super) input: InputScaling,
    /// For a static scale that is not the calibrated one: the largest absolute input.
    pub(super) amax: Option<f32>,
}

impl Fed<'_> {
    /// How the inputs of a layer are cast when they are multiplied by `shift`, and the largest absolute one that a new static scale was
    /// made of.
    fn scaling(
        &self,
        path: &str,
        shift: Option<&[f32]>,
        task: &Task<'_>,
    ) -> Result<(InputScaling, Option<f32>)> {
        let (described, input) = &task.wanted[path];
        let (Some(shift), InputScaling::Static(_)) = (shift, input) else {
            return Ok((input.clone(), None));
        };
        // The samples show by how much the largest input changes; the calibration may have seen a larger one.
        let (mut before, mut after) = (0f32, 0f32);
        for (x, _) in &self.inputs {
            before = before.max(amax(x)?);
            after = after.max(amax(&shifted(x, shift)?)?);
        }
        let calibrated = task.options.input_amaxes.get(path).copied();
        let calibrated = calibrated.filter(|_| before > 0.).unwrap_or(before);
        let new = calibrated * (after / before.max(f32::MIN_POSITIVE));
        let amaxes = BTreeMap::from([(path.to_string(), new)]);
        let options = QuantizeOptions::new(task.options.scheme).with_input_amaxes(amaxes);
        Ok((options.input_scaling(described)?, Some(new)))
    }

    /// Codes and scales of all layers, with inputs multiplied by `shift` and weights divided by it.
    pub(super) fn search(&self, shift: Option<&[f32]>, task: &Task<'_>) -> Result<Vec<Tried>> {
        let first = self.stage.first();
        let (scaling, _) = self.scaling(first, shift, task)?;
        let mut products = InputProducts::new(task.wanted[first].0.sizes.1)?;
        for (sample, (x, meant)) in self.inputs.iter().enumerate() {
            let (x, meant) = match shift {
                None => (scaling.multiplied(x)?, meant.clone()),
                Some(shift) => (
                    scaling.multiplied(&shifted(x, shift)?)?,
                    shifted(meant, shift)?,
                ),
            };
            match self.factors.get(sample) {
                None => products.add(&x, &meant)?,
                Some(factors) => {
                    products.add(&counted(&x, factors)?, &counted(&meant, factors)?)?
                }
            }
        }
        let inputs = PreparedInputs::new(&products, task.search, first)?;
        let layers = self.stage.paths.iter().zip(&self.weights);
        let layers = layers.map(|(path, weight)| {
            let (input, amax) = self.scaling(path, shift, task)?;
            let granularity = task.wanted[path].0.scheme.weight;
            let searched = match shift {
                None => search_weight(weight, granularity, &inputs, path)?,
                Some(shift) => {
                    let weight = shifted(weight, &inverse_shift(shift))?;
                    search_weight(&weight, granularity, &inputs, path)?
                }
            };
            Ok(Tried {
                path: path.clone(),
                searched,
                input,
                amax,
            })
        });
        layers.collect()
    }

    /// The squared error of a layer's outputs over their own squares, errors of the inputs' cast included, with the weight `values`:
    /// codes of the weight divided by `shift`. Of all tokens, or of about `most` of each sample.
    pub(super) fn error(
        &self,
        at: usize,
        values: &Tensor,
        shift: Option<&[f32]>,
        most: Option<usize>,
        task: &Task<'_>,
    ) -> Result<f64> {
        let (scaling, _) = self.scaling(&self.stage.paths[at], shift, task)?;
        let weight = self.weights[at].to_dtype(DType::F32)?.t()?;
        let values = values.to_dtype(DType::F32)?.t()?;
        let (mut error, mut whole) = (0f64, 0f64);
        for (x, meant) in &self.inputs {
            let x = match shift {
                None => scaling.multiplied(x)?,
                Some(shift) => scaling.multiplied(&shifted(x, shift)?)?,
            };
            let y = some(meant, most)?.matmul(&weight)?;
            let difference = (some(&x, most)?.matmul(&values)? - &y)?;
            error += squares(&difference)?;
            whole += squares(&y)?;
        }
        Ok(match whole {
            0. => 0.,
            whole => error / whole,
        })
    }
}

/// About `most` tokens of `x`, or all: `[tokens, features]` in f32.
fn some(x: &Tensor, most: Option<usize>) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?.reshape(((), x.dim(D::Minus1)?))?;
    let tokens = x.dim(0)?;
    let step = most.map_or(1, |most| tokens.div_ceil(most.max(1))).max(1);
    if step == 1 {
        return Ok(x.contiguous()?);
    }
    let rows: Vec<u32> = (0..tokens as u32).step_by(step).collect();
    let rows = Tensor::from_vec(rows, tokens.div_ceil(step), x.device())?;
    Ok(x.index_select(&rows, 0)?)
}

fn squares(x: &Tensor) -> Result<f64> {
    Ok(x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()?)
}

fn amax(x: &Tensor) -> Result<f32> {
    let amax = x.abs()?.flatten_all()?.max(0)?;
    Ok(amax.to_dtype(DType::F32)?.to_scalar()?)
}
