//! The role of a tensor in its layer.

use std::fmt;

/// A tensor role: together with the path of its layer it names a row of a [`super::StateTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Role {
    /// The input of the layer.
    Input,
    /// The weight it multiplies by.
    Weight,
    /// The gradient of its output.
    GradOutput,
}

impl Role {
    /// The name in checkpoints and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::GradOutput => "grad_output",
        }
    }

    /// Whether the tensor appears in the backward pass, after the forward pass of its step has ended.
    pub const fn is_gradient(self) -> bool {
        matches!(self, Self::GradOutput)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
