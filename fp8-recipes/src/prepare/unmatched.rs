//! Patterns that match no layer, or only modules that no recipe casts.

use super::{LayerChoice, PrepareOptions, Unmatched};
use crate::module::{Fp8Layer, Fp8Module, Fp8Operator, LayerKind, Visitor};
use candle_core::Tensor;
use fp8_files::names::near;
use std::collections::BTreeSet;

/// Patterns of the options that match none of the layers and operators that [`prepare_fp8`](crate::prepare_fp8) converts.
#[derive(Default)]
pub(crate) struct Named {
    /// Patterns that match nothing.
    pub(crate) unmatched: Vec<Unmatched>,
    /// Paths that patterns leave in high precision although nothing is cast there.
    pub(crate) high_precision_anyway: BTreeSet<String>,
}

pub(crate) fn named<M: Fp8Module + ?Sized>(model: &M, options: &PrepareOptions) -> Named {
    let mut paths = Paths {
        options,
        looked_at: vec![],
        others: BTreeSet::new(),
    };
    model.visit(&mut paths);
    let mut named = Named::default();
    // A recipe for a path without casts would have no effect, so such a pattern counts as unmatched.
    let layers = options.layers().iter();
    let layers = layers.map(|(pattern, choice)| (pattern, *choice == LayerChoice::Off));
    let output_fused = options.output_fused.iter().map(|pattern| (pattern, true));
    for (pattern, others) in layers.chain(output_fused) {
        let matches = |path: &str| pattern.matches(path);
        paths.look_up(pattern.as_str(), matches, others, &mut named);
    }
    for part in options.filter.skipped_parts() {
        paths.look_up(part, |path| path.contains(part.as_str()), true, &mut named);
    }
    named
}

struct Paths<'a> {
    options: &'a PrepareOptions,
    /// Layers and operators that may be prepared.
    looked_at: Vec<String>,
    /// Those that are not prepared under these options, and owners of other tensors, such as batch norms.
    others: BTreeSet<String>,
}

impl Paths<'_> {
    fn look_up(
        &self,
        pattern: &str,
        matches: impl Fn(&str) -> bool,
        others: bool,
        named: &mut Named,
    ) {
        if self.looked_at.iter().any(|path| matches(path)) {
            return;
        }
        let anyway = self.others.iter().filter(|path| {
            // The path of a block with layers in it does not count: the pattern leaves out none of these layers.
            let within = |layer: &String| {
                (layer.strip_prefix(path.as_str())).is_some_and(|rest| rest.starts_with('.'))
            };
            others && matches(path) && !self.looked_at.iter().any(within)
        });
        let anyway: Vec<String> = anyway.cloned().collect();
        if anyway.is_empty() {
            let paths = self
                .looked_at
                .iter()
                .chain(self.others.iter().filter(|_| others));
            named.unmatched.push(Unmatched {
                pattern: pattern.to_string(),
                near: near(pattern, paths.map(String::as_str)),
            });
        }
        named.high_precision_anyway.extend(anyway);
    }
}

impl Visitor for Paths<'_> {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        let path = layer.path().map(str::to_string);
        match self.options.convolutions || layer.kind() != LayerKind::Convolution {
            true => self.looked_at.extend(path),
            false => self.others.extend(path),
        }
    }

    fn operator(&mut self, operator: &dyn Fp8Operator) {
        let path = operator.path().map(str::to_string);
        match self.options.operators {
            true => self.looked_at.extend(path),
            false => self.others.extend(path),
        }
    }

    fn tensor(&mut self, path: Option<&str>, _: &Tensor) {
        if let Some((parent, _)) = path.and_then(|path| path.rsplit_once('.')) {
            self.others.insert(parent.to_string());
        }
    }
}
