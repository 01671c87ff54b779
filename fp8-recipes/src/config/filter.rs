//! Which layers are converted to FP8.

use std::fmt;
use std::sync::Arc;

use fp8_core::Granularity;

use super::skip::{SkipReason, WeightDim};
use super::{Fp8LinearConfig, RecipeName};

/// The decision of a filter about a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterDecision {
    /// The layer is converted.
    Take,
    /// The layer stays in high precision, for this reason.
    Skip(SkipReason),
}

impl FilterDecision {
    /// Whether the layer is converted.
    pub fn is_take(&self) -> bool {
        matches!(self, FilterDecision::Take)
    }

    /// Why the layer is skipped, if it is.
    pub fn reason(&self) -> Option<&SkipReason> {
        match self {
            FilterDecision::Take => None,
            FilterDecision::Skip(reason) => Some(reason),
        }
    }
}

type Predicate = dyn Fn(&str, usize, usize) -> bool + Send + Sync;

/// Decides by path and shape which layers are converted. The default takes every layer; each added condition can only skip more.
///
/// N = out_features, K = in_features.
///
/// ```
/// # use fp8_recipes::config::LayerFilter;
/// let filter = LayerFilter::new().skip_paths(["lm_head"]).with_multiple_of(16);
/// assert!(filter.decide("blocks.0.mlp.up", 3072, 768).is_take());
/// assert!(!filter.decide("lm_head", 3072, 768).is_take());
/// let decision = filter.decide("blocks.0.gate", 10, 768);
/// assert_eq!(decision.reason().unwrap().to_string(), "N = 10 is not a multiple of 16");
/// ```
#[derive(Clone, Default)]
pub struct LayerFilter {
    skip_paths: Vec<String>,
    auto: Option<RecipeName>,
    min_out: usize,
    min_in: usize,
    multiple_of: Option<usize>,
    custom: Option<Arc<Predicate>>,
}

impl LayerFilter {
    /// A filter that takes every layer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Also skips layers whose path contains one of these strings (torchao's rule). Empty strings are ignored;
    /// [`crate::PrepareReport::unmatched`] lists strings that are part of no path.
    #[must_use]
    pub fn skip_paths<S: Into<String>>(mut self, parts: impl IntoIterator<Item = S>) -> Self {
        self.skip_paths.extend(
            parts
                .into_iter()
                .map(Into::into)
                .filter(|part| !part.is_empty()),
        );
        self
    }

    /// Skips layers that are likely slower in FP8 than in bf16 on an accelerator; see [`auto_filter`].
    /// [`PrepareOptions::auto`](crate::PrepareOptions::auto) measures the machine at hand instead.
    #[must_use]
    pub fn with_auto(mut self, recipe: RecipeName) -> Self {
        self.auto = Some(recipe);
        self
    }

    /// Skips layers with fewer outputs or inputs than this.
    #[must_use]
    pub fn with_min_dims(mut self, min_out: usize, min_in: usize) -> Self {
        (self.min_out, self.min_in) = (min_out, min_in);
        self
    }

    /// Skips layers where N or K is not a multiple of this; 0 and 1 skip none.
    #[must_use]
    pub fn with_multiple_of(mut self, multiple: usize) -> Self {
        self.multiple_of = (multiple > 1).then_some(multiple);
        self
    }

    /// Skips layers for which `take(path, N, K)` is false. Replaces an earlier function.
    #[must_use]
    pub fn with_custom(
        mut self,
        take: impl Fn(&str, usize, usize) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.custom = Some(Arc::new(take));
        self
    }

    /// The strings of [`LayerFilter::skip_paths`].
    pub fn skipped_parts(&self) -> &[String] {
        &self.skip_paths
    }

    /// What happens to the layer with this path and a weight of `[out_features, in_features]`. The
    /// first condition that skips gives the reason.
    pub fn decide(&self, path: &str, out_features: usize, in_features: usize) -> FilterDecision {
        let (n, k) = (out_features, in_features);
        if let Some(part) = self
            .skip_paths
            .iter()
            .find(|part| path.contains(part.as_str()))
        {
            return FilterDecision::Skip(SkipReason::PathContains { part: part.clone() });
        }
        for (dim, got, least) in [
            (WeightDim::N, n, self.min_out),
            (WeightDim::K, k, self.min_in),
        ] {
            if got < least {
                return FilterDecision::Skip(SkipReason::TooFew { dim, got, least });
            }
        }
        if let Some(reason) = self.multiple_of.and_then(|of| not_multiple(n, k, of)) {
            return FilterDecision::Skip(reason);
        }
        if let Some(recipe) = self.auto {
            let decision = auto_filter(recipe, n, k);
            if !decision.is_take() {
                return decision;
            }
        }
        match &self.custom {
            Some(take) if !take(path, n, k) => FilterDecision::Skip(SkipReason::Custom),
            _ => FilterDecision::Take,
        }
    }
}

impl fmt::Debug for LayerFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerFilter")
            .field("skip_paths", &self.skip_paths)
            .field("auto", &self.auto)
            .field("min_out", &self.min_out)
            .field("min_in", &self.min_in)
            .field("multiple_of", &self.multiple_of)
            .field("custom", &self.custom.is_some())
            .finish()
    }
}

/// torchao's rule for layers that gain from FP8 on an accelerator, by shape. N = out_features, K =
/// in_features.
///
/// It skips layers where N or K is not a multiple of 16. Where inputs have one scale per tensor (`tensorwise`, `delayed`,
/// `current`) it also skips `K <= 4096 and N <= 1024`; where they have finer scales (`rowwise`, `rowwise_with_gw_hp`,
/// `blockwise`, `mxfp8`), `N <= 2048`, or `K <= 1024`, or `N <= 4096 and K <= 2048`. torchao has the rule for `tensorwise` and
/// `rowwise` only. Recipes for studies of formats (`direct`, `hybrid`) skip no shape.
pub fn auto_filter(recipe: RecipeName, n: usize, k: usize) -> FilterDecision {
    if let Some(reason) = not_multiple(n, k, 16) {
        return FilterDecision::Skip(reason);
    }
    let config = Fp8LinearConfig::from_recipe_name(recipe);
    let slower = match config.input.granularity {
        _ if config.cast_operators => false,
        Granularity::Tensorwise => k <= 4096 && n <= 1024,
        _ => n <= 2048 || k <= 1024 || (n <= 4096 && k <= 2048),
    };
    match slower {
        false => FilterDecision::Take,
        true => FilterDecision::Skip(SkipReason::TooSmall {
            recipe,
            out_features: n,
            in_features: k,
        }),
    }
}

fn not_multiple(n: usize, k: usize, of: usize) -> Option<SkipReason> {
    let (dim, got) = match (n % of, k % of) {
        (0, 0) => return None,
        (0, _) => (WeightDim::K, k),
        _ => (WeightDim::N, n),
    };
    Some(SkipReason::NotMultiple { dim, got, of })
}
