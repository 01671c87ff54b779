//! What preparations have made of a layer or operator.

use super::state::Fp8State;
use std::sync::Arc;

/// What preparations have made of a layer or operator. Without state it computes in high precision; whether a report says so decides
/// about the warnings of guards.
#[derive(Debug, Clone, Default)]
pub(crate) enum Prepared {
    /// No preparation has seen it, or only ones that prepare no operators.
    #[default]
    Never,
    /// One has left it out: its report says why, or its options name the operator.
    LeftOut,
    /// One has given it this state.
    With(Arc<Fp8State>),
}
