//! Reads the rotary positions of a `config.json`.

use super::rope::{RopeConfig, RopeScaling};
use crate::models::error::Result;
use crate::models::files::Entries;
use serde_json::Value;

/// What a family assumes of entries that a file leaves out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeDefaults {
    /// The base of the frequencies.
    pub(crate) theta: f64,
    /// `max_position_embeddings`.
    pub(crate) positions: usize,
    /// `original_max_position_embeddings` beside the object of rotary positions; None for no entry.
    pub(crate) original: Option<usize>,
    /// Whether the family can rotate a part of a head's features only.
    pub(crate) partial: bool,
}

impl RopeConfig {
    /// Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
    pub(crate) fn parse(
        config: &Entries<'_>,
        head_dim: usize,
        defaults: RopeDefaults,
    ) -> Result<Self> {
        read_rope(config, |rope| read(config, rope, head_dim, defaults))
    }
}

/// What `read` takes from the object of rotary positions: in a file with two, from the one of older versions, as transformers does. Both must
/// give the same.
pub(crate) fn read_rope<'a, T: PartialEq>(
    config: &Entries<'a>,
    read: impl Fn(Option<&Entries<'a>>) -> Result<T>,
) -> Result<T> {
    let (new, old) = (object(config, NEW)?, object(config, OLD)?);
    let found = read(old.as_ref().or(new.as_ref()))?;
    // Programs differ in which of the two they follow: transformers 5 takes the older one, and drops the base beside it.
    if let (Some(new), Some(_)) = (&new, &old)
        && read(Some(new))? != found
    {
        return Err(config.error(OLD, format!("the positions of {NEW}, or no entry")));
    }
    Ok(found)
}

const NEW: &str = "rope_parameters";
const OLD: &str = "rope_scaling";

/// An object that is not empty, for all layers.
fn object<'a>(config: &Entries<'a>, key: &str) -> Result<Option<Entries<'a>>> {
    let entries = config.read(key, "an object", Value::as_object)?;
    let rope = config.object(key);
    let (Some(entries), Some(rope)) = (entries.filter(|entries| !entries.is_empty()), rope) else {
        return Ok(None);
    };
    // Of families whose kinds of layers have positions of their own: all entries would seem to be left out.
    match entries.iter().find(|(_, value)| value.is_object()) {
        Some((layers, _)) => Err(rope.error(layers, "positions that all layers have in common")),
        None => Ok(Some(rope)),
    }
}

fn read(
    config: &Entries<'_>,
    rope: Option<&Entries<'_>>,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<RopeConfig> {
    const PART: &str = "partial_rotary_factor";
    let mut theta = config.positive("rope_theta", defaults.theta)?;
    if let Some(rope) = rope {
        theta = rope.positive("rope_theta", theta)?;
    }
    let says = rope.filter(|rope| rope.get(PART).is_some());
    let says = says.unwrap_or(config);
    let dim = (head_dim as f64 * says.positive(PART, 1.)?) as usize;
    if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
        let expected = format!("an even part of the {head_dim} features of a head");
        return Err(says.error(PART, expected));
    }
    if dim != head_dim && !defaults.partial {
        let expected = "1, as this family rotates all features of a head";
        return Err(says.error(PART, expected));
    }
    let scaling = match rope {
        None => RopeScaling::None,
        Some(rope) => scaling(config, rope, dim, defaults)?,
    };
    Ok(RopeConfig::new(theta, dim).with_scaling(scaling))
}

fn scaling(
    config: &Entries<'_>,
    rope: &Entries<'_>,
    dim: usize,
    defaults: RopeDefaults,
) -> Result<RopeScaling> {
    const KINDS: &str = "default, linear, dynamic, llama3, yarn or longrope";
    let key = match rope.get("rope_type") {
        Some(_) => "rope_type",
        None => "type",
    };
    let context = config.size("max_position_embeddings", defaults.positions)?;
    let original = || original(config, rope, defaults.original, context);
    let kind = match rope.text(key, "default")? {
        // The name in early files of Phi-3, as `su` is.
        "yarn" if rope.get("short_factor").is_some() => "longrope",
        kind => kind,
    };
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: rope.positive("factor", None)?,
        },
        "dynamic" => RopeScaling::Dynamic {
            factor: rope.positive("factor", None)?,
            original: context,
        },
        "llama3" => {
            let (low, high) = (
                rope.positive("low_freq_factor", None)?,
                rope.positive("high_freq_factor", None)?,
            );
            if high <= low {
                return Err(rope.error("high_freq_factor", format!("more than {low}")));
            }
            RopeScaling::Llama3 {
                factor: rope.positive("factor", None)?,
                low,
                high,
                original: original()?,
            }
        }
        "yarn" => {
            let factor = rope.positive("factor", None)?;
            let temperature = |mscale: f64| match factor > 1. {
                true => 0.1 * mscale * factor.ln() + 1.,
                false => 1.,
            };
            let inferred = match (rope.get("mscale"), rope.get("mscale_all_dim")) {
                (Some(_), Some(_)) => {
                    temperature(rope.positive("mscale", None)?)
                        / temperature(rope.positive("mscale_all_dim", None)?)
                }
                _ => temperature(1.),
            };
            RopeScaling::Yarn {
                factor,
                original: original()?,
                beta_fast: rope.positive("beta_fast", 32.)?,
                beta_slow: rope.positive("beta_slow", 1.)?,
                attention_factor: rope.positive("attention_factor", inferred)?,
                truncate: rope.flag("truncate", true)?,
            }
        }
        "longrope" | "su" => {
            let original = original()?;
            let factors = |key: &str| -> Result<Vec<f64>> {
                let factors = rope.numbers(key)?;
                factors
                    .filter(|factors| factors.len() == dim / 2)
                    .ok_or_else(|| rope.error(key, format!("{} positive numbers", dim / 2)))
            };
            let factor = rope.positive("factor", context as f64 / original as f64)?;
            let inferred = match factor > 1. {
                true => (1. + factor.ln() / (original as f64).ln()).sqrt(),
                false => 1.,
            };
            RopeScaling::LongRope {
                short: factors("short_factor")?,
                long: factors("long_factor")?,
                original,
                attention_factor: rope.positive("attention_factor", inferred)?,
            }
        }
        _ => return Err(rope.error(key, KINDS)),
    })
}

/// Tokens that the model was trained for before its context grew; `usual` where the family has an entry of its own for them, and `context` where
/// nothing says.
///
/// transformers 5 takes the entry beside the object, in a family that has one also the usual value of an entry that is left out. Earlier versions
/// took the one inside of the object for some scalings, so a file has to say the same in both places.
fn original(
    config: &Entries<'_>,
    rope: &Entries<'_>,
    usual: Option<usize>,
    context: usize,
) -> Result<usize> {
    const KEY: &str = "original_max_position_embeddings";
    let of = |entries: &Entries<'_>| -> Result<Option<usize>> {
        let entry = entries.get(KEY).map(|_| entries.size(KEY, None));
        entry.transpose()
    };
    let (said, inside) = (of(config)?, of(rope)?);
    let beside = said.or(usual);
    if let (Some(beside), Some(inside)) = (beside, inside)
        && beside != inside
    {
        let name = config.name(KEY);
        let expected = match said {
            Some(_) => format!("{beside}, as {name} says"),
            None => format!("{beside}, which {name} is in this family where a file leaves it out"),
        };
        return Err(rope.error(KEY, expected));
    }
    Ok(beside.or(inside).unwrap_or(context))
}
