//! What is cast to FP8 and how: configurations, named recipes, and which layers they apply to.
//!
//! A user names or builds a [`Recipe`]: [`DelayedScaling`], or an [`Fp8LinearConfig`] with all options of torchao's float8
//! training. Either may leave defaults unset, such as the second use of an operand or a format. [`Recipe::resolve`] fills them in,
//! checks that the casts fit together, and returns the [`ResolvedConfig`] that layers follow.
//!
//! | file | concern |
//! |---|---|
//! | `operand.rs`, `cast.rs` | [`CastConfig`]: how one operand of one GEMM is cast |
//! | `linear.rs` | [`Fp8LinearConfig`]: all casts and GEMMs of a linear layer |
//! | `delayed.rs` | [`DelayedScaling`] |
//! | `kept.rs` | [`KeptActivations`]: what the backward pass reads besides the codes of operands |
//! | `recipe_name.rs` | [`RecipeName`]: everything about a named recipe |
//! | `recipe.rs` | [`Recipe`] |
//! | `resolve.rs`, `resolved.rs` | filling in; checks and [`ResolvedConfig`] |
//! | `filter.rs`, `skip.rs` | [`LayerFilter`]: which layers are converted, and why the others are not |
//! | `error.rs` | [`ConfigError`] |
//!
//! All are plain values; all but the filter serialize to JSON and back.
//!
//! ```
//! # use fp8_recipes::config::{DelayedScaling, Fp8LinearConfig, Recipe, RecipeName};
//! let by_name: Recipe = "rowwise".parse()?;
//! let built: Recipe = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise).into();
//! assert_eq!(by_name, built);
//! assert_eq!(by_name.resolve()?.to_string(), "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3");
//!
//! let delayed: Recipe = DelayedScaling::default().with_amax_history_len(16).into();
//! assert_eq!(delayed.resolve()?.to_string(), "i:del_ten_e4m3,w:del_ten_e4m3,go:del_ten_e5m2");
//! # Ok::<(), fp8_recipes::config::ConfigError>(())
//! ```

mod amax_text;
mod cast;
mod delayed;
mod error;
mod filter;
mod kept;
mod linear;
mod operand;
mod recipe;
mod recipe_name;
mod resolve;
mod resolved;
mod skip;

// The types of fields.
pub use fp8_core::{
    AmaxCompute, CustomAmax, Format, FormatPair, Granularity, Overflow, ScaleRounding,
};

pub use cast::{CastConfig, CastRounding};
pub(crate) use delayed::check_history_len;
pub use delayed::{DelayedFormat, DelayedScaling, InitialScale};
pub use error::ConfigError;
pub use filter::{FilterDecision, LayerFilter, auto_filter};
pub use fp8_files::names::PathPattern;
pub use kept::KeptActivations;
pub use linear::{Fp8LinearConfig, GemmConfig};
pub use operand::{Gemm, Operand, ScalingType};
pub use recipe::Recipe;
pub use recipe_name::RecipeName;
pub use resolved::ResolvedConfig;
pub use skip::{SkipReason, WeightDim};
