//! Paths of layers and the tensors' own names.

/// The path of a layer and the tensor's own name.
pub(super) fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

pub(super) fn join(path: &str, own: &str) -> String {
    crate::nn::join(path, own)
}

pub(super) fn weight_name(path: &str) -> String {
    join(path, "weight")
}
