//! How a model shows its layers: conversion, export and checkpoints visit them by path.

use crate::nn::{StaticWeight, join};
use crate::state::Fp8State;
use candle_core::Tensor;
use fp8_candle::Role;
use std::sync::Arc;

/// A layer whose computation can run in FP8. A new kind of layer is a file in `nn/` that implements this.
pub trait Fp8Layer {
    /// Path in the checkpoint, empty if unknown.
    fn path(&self) -> &str;

    /// The tensors whose scales are kept between steps, each a row of the model's table.
    fn roles(&self) -> &'static [Role];

    /// FP8 state, if the layer is prepared.
    fn fp8_state(&self) -> Option<&Arc<Fp8State>>;

    /// Gives or takes away FP8 state. [`crate::prepare_fp8`] does this for a whole model.
    fn set_fp8_state(&mut self, state: Option<Arc<Fp8State>>);

    /// The weight as it is held: values in high precision, or the codes of [`Fp8Layer::static_weight`] in the form that the
    /// device streams. What tied layers share.
    fn held_weight(&self) -> &Tensor;

    /// The FP8 weight of a layer loaded from an FP8 checkpoint.
    fn static_weight(&self) -> Option<&StaticWeight>;

    /// The bias, if the layer has one.
    fn bias(&self) -> Option<&Tensor>;

    /// Kept and contracted size of the weight's matrix: (out_features, in_features).
    fn features(&self) -> (usize, usize);

    /// Bytes that the weight and its scales hold.
    fn weight_bytes(&self) -> usize {
        match self.static_weight() {
            Some(weight) => weight.weight().size_in_bytes(),
            None => {
                let weight = self.held_weight();
                weight.elem_count() * weight.dtype().size_in_bytes()
            }
        }
    }
}

/// Looks at the layers and tensors of a model.
pub trait Visitor {
    /// A layer that can run in FP8; its tensors are not shown again by [`Visitor::tensor`]. By default they are handed to it:
    /// `{path}.weight` as it is held, and `{path}.bias`.
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        let path = layer.path();
        self.tensor(&join(path, "weight"), layer.held_weight());
        if let Some(bias) = layer.bias() {
            self.tensor(&join(path, "bias"), bias);
        }
    }

    /// A parameter that belongs to no such layer. `path` is its full name in the checkpoint.
    fn tensor(&mut self, path: &str, tensor: &Tensor);
}

/// Changes the layers of a model.
pub trait VisitorMut {
    /// A layer that can run in FP8.
    fn layer(&mut self, layer: &mut dyn Fp8Layer);
}

/// A model, or a part of one, that can be visited.
///
/// [`fp8_module!`](crate::fp8_module) implements it in one line. Paths come from the layers themselves, which know
/// them from `VarBuilder::prefix`.
pub trait Fp8Module {
    /// Shows every layer and tensor, in the order of the fields.
    fn visit(&self, visitor: &mut dyn Visitor);

    /// Shows every linear layer for a change.
    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut);
}

impl<T: Fp8Module> Fp8Module for Vec<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.iter().for_each(|module| module.visit(visitor));
    }

    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut) {
        self.iter_mut().for_each(|module| module.visit_mut(visitor));
    }
}

impl<T: Fp8Module, const N: usize> Fp8Module for [T; N] {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.iter().for_each(|module| module.visit(visitor));
    }

    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut) {
        self.iter_mut().for_each(|module| module.visit_mut(visitor));
    }
}

impl<T: Fp8Module> Fp8Module for Option<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.iter().for_each(|module| module.visit(visitor));
    }

    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut) {
        self.iter_mut().for_each(|module| module.visit_mut(visitor));
    }
}

impl<T: Fp8Module + ?Sized> Fp8Module for Box<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        (**self).visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut) {
        (**self).visit_mut(visitor);
    }
}

impl<A: Fp8Module, B: Fp8Module> Fp8Module for (A, B) {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.0.visit(visitor);
        self.1.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut dyn VisitorMut) {
        self.0.visit_mut(visitor);
        self.1.visit_mut(visitor);
    }
}

/// Implements [`Fp8Module`] for a struct by naming its fields; those after `skip` hold no parameters.
///
/// Every field must be named, so that a field added later is not forgotten in an export: leaving one out does not
/// compile. A field that holds parameters in spite of its place after `skip` would be missed;
/// [`ExportOptions`](crate::ExportOptions) finds it.
///
/// ```
/// use fp8_recipes::{fp8_module, nn};
///
/// struct Mlp {
///     up: nn::Linear,
///     down: nn::Linear,
///     dropout: f32,
/// }
/// fp8_module!(Mlp { up, down; skip dropout });
/// ```
#[macro_export]
macro_rules! fp8_module {
    ($type:ty { $($field:ident),* $(,)? $(; skip $($skip:ident),+ $(,)?)? }) => {
        impl $crate::Fp8Module for $type {
            fn visit(&self, visitor: &mut dyn $crate::Visitor) {
                let Self { $($field,)* $($($skip: _,)+)? } = self;
                let _ = &visitor;
                $($crate::Fp8Module::visit($field, visitor);)*
            }

            fn visit_mut(&mut self, visitor: &mut dyn $crate::VisitorMut) {
                let Self { $($field,)* $($($skip: _,)+)? } = self;
                let _ = &visitor;
                $($crate::Fp8Module::visit_mut($field, visitor);)*
            }
        }
    };
}
