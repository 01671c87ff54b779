//! The three kinds of arrays.

use super::in_node::InNode;
use super::operations::{Array, sealed::Sealed};
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{Activation, AttentionOptions};
use fp8_scaled::Scaled;

/// The methods of an array that only depend on its kind, among them the choice of one of three functions.
macro_rules! kind {
    ($type:ident, $chosen:ident of ($plain:pat, $scaled:pat, $in_node:pat)) => {
        fn dims(&self) -> &[usize] {
            $type::dims(self)
        }

        fn device(&self) -> &Device {
            $type::device(self)
        }

        fn by_kind(
            &self,
            $plain: impl FnOnce(&Tensor) -> Result<Tensor>,
            $scaled: impl FnOnce(&Scaled) -> Result<Scaled>,
            $in_node: impl FnOnce(&InNode) -> Result<InNode>,
        ) -> Result<Self> {
            $chosen(self)
        }

        fn by_kind_many(
            &self,
            $plain: impl FnOnce(&Tensor) -> Result<Vec<Tensor>>,
            $scaled: impl FnOnce(&Scaled) -> Result<Vec<Scaled>>,
            $in_node: impl FnOnce(&InNode) -> Result<Vec<InNode>>,
        ) -> Result<Vec<Self>> {
            $chosen(self)
        }
    };
}

impl Sealed for Tensor {}

impl Array for Tensor {
    kind!(Tensor, plain of (plain, _, _));

    fn plain(&self) -> Option<&Tensor> {
        Some(self)
    }

    fn value(&self) -> Result<Tensor> {
        Ok(self.detach().to_dtype(DType::F32)?)
    }

    fn create(
        plain: impl FnOnce() -> Result<Tensor>,
        _: impl FnOnce() -> Result<Scaled>,
    ) -> Result<Self> {
        plain()
    }

    fn combine(
        parts: &[&Self],
        plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
        _: impl FnOnce(&[&Scaled]) -> Result<Scaled>,
    ) -> Result<Self> {
        let parts: Vec<Tensor> = parts.iter().map(|part| (*part).clone()).collect();
        plain(&parts)
    }
}

impl Sealed for Scaled {}

impl Array for Scaled {
    kind!(Scaled, scaled of (_, scaled, _));

    fn value(&self) -> Result<Tensor> {
        Ok(self.to_tensor(DType::F32)?)
    }

    fn create(
        _: impl FnOnce() -> Result<Tensor>,
        scaled: impl FnOnce() -> Result<Scaled>,
    ) -> Result<Self> {
        scaled()
    }

    fn combine(
        parts: &[&Self],
        _: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
        scaled: impl FnOnce(&[&Scaled]) -> Result<Scaled>,
    ) -> Result<Self> {
        scaled(parts)
    }
}

impl Sealed for InNode {}

impl Array for InNode {
    kind!(InNode, in_node of (_, _, in_node));

    fn value(&self) -> Result<Tensor> {
        Ok(self.tensor()?.to_dtype(DType::F32)?)
    }

    fn create(
        _: impl FnOnce() -> Result<Tensor>,
        _: impl FnOnce() -> Result<Scaled>,
    ) -> Result<Self> {
        let message = "a node of the graph has no value without an argument";
        Err(candle_core::Error::Msg(message.into()).into())
    }

    fn combine(
        parts: &[&Self],
        plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
        _: impl FnOnce(&[&Scaled]) -> Result<Scaled>,
    ) -> Result<Self> {
        Self::opaque(parts, plain)
    }

    fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
        InNode::attention([q, k, v], &options)
    }

    fn add(&self, other: &Self) -> Result<Self> {
        InNode::add(self, other)
    }

    fn gated_activation(&self, value: &Self, activation: Activation) -> Result<Self> {
        InNode::gated_activation(self, value, activation)
    }
}
