//! How a model shows its layers: conversion, export and checkpoints visit them by path.

use crate::nn::Linear;
use candle_core::Tensor;

/// Looks at the layers and tensors of a model.
pub trait Visitor {
    /// A linear layer; its tensors are not shown again by [`Visitor::tensor`].
    fn linear(&mut self, linear: &Linear);

    /// A parameter that belongs to no linear layer. `path` is its full name in the checkpoint.
    fn tensor(&mut self, path: &str, tensor: &Tensor);
}

/// Changes the linear layers of a model.
pub trait VisitorMut {
    /// A linear layer.
    fn linear(&mut self, linear: &mut Linear);
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
/// compile.
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
