//! Limits on the sizes of a model.

use crate::gpt::GptConfig;
use crate::vocabulary::BYTES;
use thiserror::Error;

/// Training keeps 16 bytes for each parameter: value, gradient, two moments.
const MOST_PARAMETERS: u64 = 4_000_000_000;
const MOST_TOKENS: usize = 1 << 16;
const LONGEST_CONTEXT: usize = 1 << 14;

/// Invalid sizes of a model.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    #[error("{flag} 0: give at least 1")]
    Zero { flag: &'static str },
    #[error(
        "--hidden {hidden} --heads {heads}: rotary positions need an even number of features in each head, give a multiple of {}",
        heads.saturating_mul(2)
    )]
    Heads { hidden: usize, heads: usize },
    #[error(
        "--vocab {vocab}: tokens are bytes and merged pairs of them, give {BYTES} to {MOST_TOKENS}"
    )]
    Vocab { vocab: usize },
    #[error(
        "--hidden {hidden} --layers {layers} --vocab {vocab}: more than {MOST_PARAMETERS} parameters, training would keep 16 bytes for each"
    )]
    TooLarge {
        hidden: usize,
        layers: usize,
        vocab: usize,
    },
    #[error(
        "--hidden {hidden} --recipe {recipe}: files of this recipe have whole groups of {group} inputs, give a multiple of {group}"
    )]
    Groups {
        hidden: usize,
        recipe: String,
        group: usize,
    },
    #[error("--context {context}: give at most {LONGEST_CONTEXT} tokens")]
    Context { context: usize },
}

/// Checks the sizes of a model and returns its number of parameters.
pub fn check(config: &GptConfig) -> Result<u64, SizeError> {
    let GptConfig {
        vocab_size: vocab,
        hidden_size: hidden,
        num_layers: layers,
        num_heads: heads,
        context,
        ..
    } = *config;
    let sizes = [
        ("--hidden", hidden),
        ("--layers", layers),
        ("--heads", heads),
        ("--context", context),
    ];
    if let Some((flag, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
        return Err(SizeError::Zero { flag });
    }
    if !(BYTES..=MOST_TOKENS).contains(&vocab) {
        return Err(SizeError::Vocab { vocab });
    }
    if heads > hidden || !hidden.is_multiple_of(2 * heads) {
        return Err(SizeError::Heads { hidden, heads });
    }
    if context > LONGEST_CONTEXT {
        return Err(SizeError::Context { context });
    }
    parameters(hidden as u64, layers as u64, vocab as u64)
        .filter(|&count| count <= MOST_PARAMETERS)
        .ok_or(SizeError::TooLarge {
            hidden,
            layers,
            vocab,
        })
}

/// Checks that the model that will be saved of these recipes can be written in FP8. Its layers have `hidden` or four times as many
/// inputs.
pub fn check_groups(hidden: usize, recipes: &[String]) -> Result<(), SizeError> {
    let group = |recipe: &str| match recipe {
        "blockwise" => 128,
        "mxfp8" => 32,
        _ => 1,
    };
    // As `main` chooses: `delayed` if it is there, else the last one in FP8.
    let high_precision = |recipe: &str| recipe == "f32" || recipe.starts_with("scaled_");
    let fp8 = recipes.iter().filter(|recipe| !high_precision(recipe));
    let saved = fp8.max_by_key(|recipe| *recipe == "delayed");
    match saved.map(|recipe| (recipe, group(recipe))) {
        Some((recipe, group)) if !hidden.is_multiple_of(group) => Err(SizeError::Groups {
            hidden,
            recipe: recipe.clone(),
            group,
        }),
        _ => Ok(()),
    }
}

/// A block: four projections of attention and two of the MLP with biases, two norms; around the blocks an embedding, a head
/// without bias, and a norm. None if the number overflows.
fn parameters(hidden: u64, layers: u64, vocab: u64) -> Option<u64> {
    let square = hidden.checked_mul(hidden)?;
    let block = square
        .checked_mul(12)?
        .checked_add(hidden.checked_mul(13)?)?;
    let ends = hidden.checked_mul(vocab.checked_mul(2)?.checked_add(2)?)?;
    block.checked_mul(layers)?.checked_add(ends)
}
