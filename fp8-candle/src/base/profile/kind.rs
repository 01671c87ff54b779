//! Kinds of work whose time is counted.

/// Kinds of work of a thread.
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
    /// Everything else.
    Other,
}

/// How many kinds there are.
pub(super) const KINDS: usize = 10;

/// Every kind with its name, in the order of the enum and of tables.
const ALL: [(Kind, &str); KINDS] = [
    (Kind::Cast, "casts"),
    (Kind::Gemm, "GEMMs"),
    (Kind::Attention, "attention"),
    (Kind::Norm, "norms"),
    (Kind::Activation, "activations"),
    (Kind::Loss, "loss"),
    (Kind::Optimizer, "optimizer"),
    (Kind::Candle, "candle"),
    (Kind::Data, "data"),
    (Kind::Other, "other"),
];

impl Kind {
    /// Every kind, in the order of tables.
    pub fn all() -> impl Iterator<Item = Self> {
        ALL.into_iter().map(|(kind, _)| kind)
    }

    /// The name in tables.
    pub fn name(self) -> &'static str {
        ALL[self as usize].1
    }
}
