//! Values of new parameters.

use super::error::Result;
use super::vars::locked;
use crate::fp8_core::philox4x32_10;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;

/// Standard deviation of the weights of new layers, as in transformers.
const DEVIATION: f32 = 0.02;

/// Draws the matrices of new adapters by a seed, uniformly from +-1 / sqrt(in_features) for each A as PEFT does; each B stays zero. Layers
/// that the adapter replaces are drawn too, whatever the base has there, with a small deviation and without a bias. The same seed and names
/// give the same numbers on every machine.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::VarMap;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// vars.get((2, 3), "q_proj.lora_A.weight", candle_nn::init::ZERO, DType::F32, &Device::Cpu)?;
/// fp8::training::initialize_adapter(&vars, 7)?;
/// # assert!(vars.all_vars()[0].abs()?.sum_all()?.to_scalar::<f32>()? > 0.);
/// # Ok(()) }
/// ```
///
/// # Errors
/// If a variable cannot be set.
pub fn initialize_adapter(vars: &VarMap, seed: u64) -> Result<()> {
    let mut number = 0;
    let set = |name: &str, var: &Var| {
        if !name.ends_with("lora_A.weight") {
            return Ok(());
        }
        let (_, inputs) = var.dims2()?;
        number += 1;
        let bound = 1. / (inputs.max(1) as f32).sqrt();
        uniform(var, seed, [number - 1, 0], bound)
    };
    in_order(vars, set)?;
    draw(vars, seed, |name| !name.contains(".lora_"))
}

/// Draws the matrices among new variables uniformly, with the deviation of transformers' new layers; the others are zero.
pub(super) fn draw(vars: &VarMap, seed: u64, is_new: impl Fn(&str) -> bool) -> Result<()> {
    let mut number = 0;
    in_order(vars, |name, var| {
        if !is_new(name) {
            return Ok(());
        }
        number += 1;
        match var.rank() {
            // The deviation of uniform numbers is their bound over the root of 3.
            2 => uniform(var, seed, [number - 1, 1], DEVIATION * 3f32.sqrt()),
            _ => Ok(var.set(&var.zeros_like()?)?),
        }
    })
}

fn in_order(vars: &VarMap, mut set: impl FnMut(&str, &Var) -> Result<()>) -> Result<()> {
    let vars = locked(vars)?;
    let mut names: Vec<_> = vars.iter().collect();
    names.sort_by_key(|(name, _)| *name);
    (names.into_iter()).try_for_each(|(name, var)| set(name, var))
}

/// Sets uniform numbers between -`bound` and `bound`, different ones for each `place`.
fn uniform(var: &Var, seed: u64, place: [u32; 2], bound: f32) -> Result<()> {
    let count = var.elem_count();
    let key = [seed as u32, (seed >> 32) as u32];
    let values = (0..count.div_ceil(4)).flat_map(|i| {
        let counter = [i as u32, (i >> 32) as u32, place[0], place[1]];
        // 24 bits each, as many as an f32 below 1 has.
        let unit = |word: u32| (word >> 8) as f32 / (1 << 24) as f32;
        philox4x32_10(counter, key).map(|word| (2. * unit(word) - 1.) * bound)
    });
    let values: Vec<f32> = values.take(count).collect();
    let values = Tensor::from_vec(values, var.shape(), var.device())?;
    Ok(var.set(&values.to_dtype(var.dtype())?)?)
}
