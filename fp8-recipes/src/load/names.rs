//! Paths of layers and the tensors' own names.

/// The path of a layer and the tensor's own name. A name that begins with a dot has no path, so that [`join`] gives it back.
pub(super) fn split(name: &str) -> (&str, &str) {
    let parts = name.rsplit_once('.');
    parts
        .filter(|(path, _)| !path.is_empty())
        .unwrap_or(("", name))
}

pub(super) fn join(path: &str, own: &str) -> String {
    crate::nn::join(path, own)
}

pub(super) fn weight_name(path: &str) -> String {
    join(path, "weight")
}
