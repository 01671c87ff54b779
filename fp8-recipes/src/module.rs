//! How a model shows its layers: conversion, export and checkpoints visit them by path.

use crate::autocast::Fp8State;
use crate::nn::StaticWeight;
use candle_core::Tensor;
use fp8_candle::{LayerShards, Role};
use fp8_files::names::join;
use std::sync::Arc;

mod containers;
mod leaves;
mod operator;
mod same_values;

pub(crate) use leaves::nothing;

pub use operator::{Fp8Operator, LayerKind};
pub(crate) use same_values::{has_same_bits, has_same_values};

/// A layer whose computation can run in FP8. A new kind of layer is a file in `nn/` that implements this.
pub trait Fp8Layer {
    /// Path in the checkpoint: empty at its root, None where the layer does not know it.
    fn path(&self) -> Option<&str>;

    /// What it computes.
    fn kind(&self) -> LayerKind {
        LayerKind::Linear
    }

    /// The tensors whose scales are kept between steps, each a row of the model's table.
    fn roles(&self) -> &'static [Role];

    /// FP8 state, if the layer is prepared.
    fn fp8_state(&self) -> Option<Arc<Fp8State>>;

    /// Sets or removes the FP8 state of this layer and all its clones. [`crate::prepare_fp8`] does this for a whole model. Once
    /// removed, guards treat the layer as left out on purpose.
    fn set_fp8_state(&self, state: Option<Arc<Fp8State>>);

    /// The weight as it is held: values in high precision, or the codes of [`Fp8Layer::static_weight`] in the form that the
    /// device streams. Tied layers share this tensor.
    fn held_weight(&self) -> &Tensor;

    /// The FP8 weight of a layer loaded from an FP8 checkpoint.
    fn static_weight(&self) -> Option<&StaticWeight>;

    /// The name of the weight in a checkpoint, after the path and a dot.
    fn weight_name(&self) -> &'static str {
        "weight"
    }

    /// The weight as the matrix `[out_features, in_features]` that is cast, where it is one and [`Fp8Layer::held_weight`] has
    /// another shape: in f32, contiguous, outside any graph. None where it is `held_weight`.
    ///
    /// # Errors
    /// If a device fails.
    fn weight_matrix(&self) -> candle_core::Result<Option<Tensor>> {
        Ok(None)
    }

    /// The bias, if the layer has one.
    fn bias(&self) -> Option<&Tensor>;

    /// Kept and contracted size of the weight's matrix: (out_features, in_features).
    fn features(&self) -> (usize, usize);

    /// The dimension of the weight that has the output channels: 0, or 1 of a transposed convolution. None where groups share it.
    fn output_dim(&self) -> Option<usize> {
        Some(0)
    }

    /// The parts that ranks hold of this layer's tensors; None if this rank has all of them.
    fn shards(&self) -> Option<Arc<LayerShards>> {
        None
    }

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

/// Visits the layers and tensors of a model.
pub trait Visitor {
    /// A layer that can run in FP8; its tensors are not shown again by [`Visitor::tensor`]. By default they are handed to it:
    /// the weight as it is held, under its name (`{path}.weight`), and `{path}.bias`.
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        show_layer(self, layer);
    }

    /// An operator without a GEMM of its own, whose tensors a recipe may cast. Its tensors are shown by [`Visitor::tensor`] as well.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::{Fp8Module, Fp8Operator, LayerKind, Visitor, nn};
    /// struct Kinds(Vec<LayerKind>);
    /// impl Visitor for Kinds {
    ///     fn operator(&mut self, operator: &dyn Fp8Operator) {
    ///         self.0.push(operator.kind());
    ///     }
    ///
    ///     fn tensor(&mut self, _: Option<&str>, _: &candle_core::Tensor) {}
    /// }
    /// let mut kinds = Kinds(vec![]);
    /// vec![nn::Add::new("first"), nn::Add::new("second")].visit(&mut kinds);
    /// assert_eq!(kinds.0, [LayerKind::Add; 2]);
    /// ```
    fn operator(&mut self, operator: &dyn Fp8Operator) {
        let _ = operator;
    }

    /// A layer of candle_nn that would be an [`Fp8Layer`] if it were the one of [`nn`](crate::nn). Its tensors are shown by
    /// [`Visitor::tensor`] as well. What a closure or a skipped field holds is not visited.
    fn candle_layer(&mut self, kind: LayerKind, weight: &Tensor) {
        let _ = (kind, weight);
    }

    /// A batch norm, which is never cast, and its path. By default its tensors are handed to [`Visitor::tensor`].
    fn batch_norm(&mut self, path: Option<&str>, norm: &candle_nn::BatchNorm) {
        show_batch_norm(self, path, norm);
    }

    /// A tensor that belongs to no such layer.
    ///
    /// `path` is its full name in the checkpoint. None where the model does not know it: a bare `Tensor` field or a layer of
    /// `candle_nn`. It may then be a parameter, whose name the VarMap knows
    /// ([`ExportOptions::with_vars`](crate::ExportOptions::with_vars)), or a buffer, such as a mask or a table of sines.
    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        let _ = (path, tensor);
    }
}

/// Calls `f` with every [`Fp8Layer`] of `model`.
pub(crate) fn for_each_layer<M: Fp8Module + ?Sized>(model: &M, f: impl FnMut(&dyn Fp8Layer)) {
    struct Layers<F>(F);
    impl<F: FnMut(&dyn Fp8Layer)> Visitor for Layers<F> {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            (self.0)(layer);
        }
    }
    model.visit(&mut Layers(f));
}

/// A model, or a part of one, that can be visited.
///
/// `#[derive(Fp8Module)]` implements it by visiting every field. It is implemented for the layers of [`nn`](crate::nn) and of
/// `candle_nn`, for tensors, containers (`Vec`, `Option`, `Box`, `Arc`, maps, tuples, locks, ..) and for what holds no
/// parameters (numbers, strings, `Activation`, `Dropout`, `Device`, ..). What a closure captures cannot be seen:
/// `candle_nn::Func` shows nothing, and a field that is a closure takes `#[fp8(skip)]`.
///
/// Paths come from the layers themselves, which know them from `VarBuilder::prefix`.
///
/// ```
/// # #![allow(dead_code)]
/// # use fp8_recipes as fp8;
/// use fp8::{Fp8Module, nn};
///
/// #[derive(Fp8Module)]
/// struct Mlp {
///     up: nn::Linear,
///     down: nn::Linear,
///     dropout: f32,
///     #[fp8(skip)] // Holds no parameters, and its type has no `Fp8Module`.
///     activation: fn(&candle_core::Tensor) -> candle_core::Result<candle_core::Tensor>,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not show its layers and parameters to FP8",
    label = "`Fp8Module` is not implemented for `{Self}`",
    note = "a struct or enum of your own: put `#[derive(Fp8Module)]` on it",
    note = "a field without parameters (a closure, a cache, a configuration): put `#[fp8(skip)]` on it",
    note = "a layer of `candle_nn` that keeps its tensors to itself (GroupNorm, LSTM, GRU, Sequential): take the one of `nn`",
    note = "a type of another crate that does hold parameters: wrap it, and show each tensor as an `nn::NamedTensor`"
)]
pub trait Fp8Module {
    /// Shows every layer and tensor, in the order of the fields. A layer's FP8 state lies behind a lock shared by its
    /// clones, so that a visitor can change it.
    fn visit(&self, visitor: &mut dyn Visitor);
}

/// Hands a tensor to [`Visitor::tensor`] as `{path}.{name}`, or without a name if the path is unknown.
pub(crate) fn show(
    visitor: &mut (impl Visitor + ?Sized),
    path: Option<&str>,
    name: &str,
    tensor: &Tensor,
) {
    let name = path.map(|path| join(path, name));
    visitor.tensor(name.as_deref(), tensor);
}

/// Hands weight and bias of a layer to [`Visitor::tensor`].
pub(crate) fn show_layer(visitor: &mut (impl Visitor + ?Sized), layer: &dyn Fp8Layer) {
    let name = layer.weight_name();
    show(visitor, layer.path(), name, layer.held_weight());
    if let Some(bias) = layer.bias() {
        show(visitor, layer.path(), "bias", bias);
    }
}

/// Hands the tensors of a batch norm to [`Visitor::tensor`].
pub(crate) fn show_batch_norm(
    visitor: &mut (impl Visitor + ?Sized),
    path: Option<&str>,
    norm: &candle_nn::BatchNorm,
) {
    show(visitor, path, "running_mean", norm.running_mean());
    show(visitor, path, "running_var", norm.running_var());
    if let Some((weight, bias)) = norm.weight_and_bias() {
        show(visitor, path, "weight", weight);
        show(visitor, path, "bias", bias);
    }
}
