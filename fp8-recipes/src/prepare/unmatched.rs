//! Patterns that name no layer.

use super::{PrepareOptions, Unmatched};
use crate::config::near;
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::operator::{Fp8Operator, LayerKind};
use candle_core::Tensor;

/// Patterns of the options that name none of the layers and operators that [`prepare_fp8`](crate::prepare_fp8) would look at.
pub(crate) fn unmatched<M: Fp8Module + ?Sized>(
    model: &M,
    options: &PrepareOptions,
) -> Vec<Unmatched> {
    let mut looked_at = Paths {
        options,
        paths: vec![],
    };
    model.visit(&mut looked_at);
    let paths = || looked_at.paths.iter().map(String::as_str);
    let patterns = options.layers().iter().map(|(pattern, _)| pattern);
    let patterns = patterns.chain(&options.output_fused).filter_map(|pattern| {
        let named = paths().any(|path| pattern.matches(path));
        (!named).then(|| pattern.as_str())
    });
    let parts = options.filter.skipped_parts().iter();
    let parts = parts.filter(|part| !paths().any(|path| path.contains(part.as_str())));
    let all = patterns.chain(parts.map(String::as_str));
    all.map(|pattern| Unmatched {
        pattern: pattern.to_string(),
        near: near(pattern, paths()),
    })
    .collect()
}

struct Paths<'a> {
    options: &'a PrepareOptions,
    paths: Vec<String>,
}

impl Visitor for Paths<'_> {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if self.options.convolutions || layer.kind() != LayerKind::Convolution {
            self.paths.extend(layer.path().map(str::to_string));
        }
    }

    fn operator(&mut self, operator: &dyn Fp8Operator) {
        if self.options.operators {
            self.paths.extend(operator.path().map(str::to_string));
        }
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}
