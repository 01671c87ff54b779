//! The sizes of one call of attention.

/// The sizes of one call, checked by `ops::attention`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
    pub(crate) softmax_scale: f64,
    /// Whether the dimensions are batch, token, head, feature instead of batch, head, token, feature.
    pub(crate) tokens_first: bool,
}

impl Attention {
    /// Pairs of a batch entry and a head.
    #[cfg(feature = "cuda")]
    pub(crate) fn pairs(&self) -> usize {
        self.batch * self.heads
    }
}
