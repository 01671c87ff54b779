//! What is cast to FP8 and how: configurations, named recipes, and which layers they apply to.
//!
//! A [`Recipe`] is what a user names or builds: [`DelayedScaling`] or an [`Fp8LinearConfig`], the
//! whole configuration surface of torchao's float8 training. Both leave things open (a second use
//! of an operand, a format). [`Recipe::resolve`] fills them in, checks that the whole makes sense,
//! and gives a [`ResolvedConfig`] that a layer can follow without further questions.
//!
//! | file | concern |
//! |---|---|
//! | `cast.rs` | [`CastConfig`]: how one operand of one GEMM is cast |
//! | `linear.rs` | [`Fp8LinearConfig`]: all casts and GEMMs of a linear layer |
//! | `delayed.rs` | [`DelayedScaling`] |
//! | `recipe.rs` | [`RecipeName`], [`Recipe`] |
//! | `resolve.rs` | filling in and checking; [`ResolvedConfig`] |
//! | `filter.rs`, `skip.rs` | [`LayerFilter`]: which layers are converted, and why the others are not |
//! | `text.rs` | spellings that fp8-core does not have |
//! | `error.rs` | [`ConfigError`] |
//!
//! All of it has value semantics, and all but the filter goes to JSON and back.
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

mod cast;
mod delayed;
mod error;
mod filter;
mod linear;
mod recipe;
mod resolve;
mod skip;
mod text;

// What fields of the configurations are made of.
pub use fp8_core::{
    AmaxCompute, CustomAmax, Format, FormatPair, Granularity, Overflow, ScaleRounding,
};

pub use cast::{CastConfig, CastRounding, Gemm, Operand, ScalingType};
pub(crate) use delayed::check_history_len;
pub use delayed::{DelayedFormat, DelayedScaling, InitialScale};
pub use error::ConfigError;
pub use filter::{FilterDecision, LayerFilter, auto_filter};
pub use fp8_files::names::PathPattern;
pub use linear::{Fp8LinearConfig, GemmConfig};
pub use recipe::{Recipe, RecipeName};
pub use resolve::ResolvedConfig;
pub use skip::{SkipReason, WeightDim};
