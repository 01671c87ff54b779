//! Whether a file has a tensor.

use crate::nn::VarBuilder;

/// Whether `vb` reads from a file that has the tensor. A VarMap claims to have every tensor.
pub(crate) fn file_has(vb: &VarBuilder<'_>, name: &str) -> bool {
    vb.contains_tensor(name) && !vb.contains_tensor("__no_such_tensor__")
}
