//! What preparations have made of a layer or operator.

use super::state::Fp8State;
use std::sync::Arc;

/// What preparations have made of a layer or operator. Without state it computes in high precision; whether a report says so decides
/// about the warnings of guards.
#[derive(Debug, Clone, Default)]
pub(crate) enum Prepared {
    /// None has seen it, or only such as prepare no operators.
    #[default]
    Never,
    /// One has left it out, and its report says why.
    LeftOut,
    /// One has given it this state.
    With(Arc<Fp8State>),
}
