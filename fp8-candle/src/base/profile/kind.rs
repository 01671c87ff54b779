//! Kinds of work whose time is counted.

/// What a thread can spend its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Amaxes, scales, FP8 codes of tensors and values of codes.
    Cast,
    /// Products of FP8 matrices, and the sums over rows that are gradients of biases.
    Gemm,
    /// Attention, softmax and rotary positions. Where attention is composed of products, their gradients are candle's.
    Attention,
    /// Layer norm and RMS norm.
    Norm,
    /// Activations and dropout.
    Activation,
    /// Cross entropy.
    Loss,
    /// Steps of optimizers.
    Optimizer,
    /// What candle computes by itself in a forward or backward pass. No operation of this crate claims it: a program enters it
    /// around the two passes.
    Candle,
    /// Reading and making batches; claimed by programs.
    Data,
    /// What nothing has claimed.
    Other,
}

/// Kinds of [`Kind`].
pub(super) const KINDS: usize = 10;

impl Kind {
    /// Every kind, in the order of tables.
    pub fn all() -> impl Iterator<Item = Self> {
        const ALL: [Kind; KINDS] = [
            Kind::Cast,
            Kind::Gemm,
            Kind::Attention,
            Kind::Norm,
            Kind::Activation,
            Kind::Loss,
            Kind::Optimizer,
            Kind::Candle,
            Kind::Data,
            Kind::Other,
        ];
        ALL.into_iter()
    }

    /// The word in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cast => "casts",
            Self::Gemm => "GEMMs",
            Self::Attention => "attention",
            Self::Norm => "norms",
            Self::Activation => "activations",
            Self::Loss => "loss",
            Self::Optimizer => "optimizer",
            Self::Candle => "candle",
            Self::Data => "data",
            Self::Other => "other",
        }
    }
}
