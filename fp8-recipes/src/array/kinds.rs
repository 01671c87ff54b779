//! The three kinds of arrays.

use super::in_node::InNode;
use super::operations::{Array, sealed::Sealed};
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{self, Activation, AttentionOptions};
use fp8_scaled::Scaled;

impl Sealed for Tensor {}

impl Array for Tensor {
    fn dims(&self) -> &[usize] {
        Tensor::dims(self)
    }

    fn device(&self) -> &Device {
        Tensor::device(self)
    }

    fn value(&self) -> Result<Tensor> {
        Ok(self.detach().to_dtype(DType::F32)?)
    }

    fn by_kind(
        &self,
        plain: impl FnOnce(&Tensor) -> Result<Tensor>,
        _: impl FnOnce(&Scaled) -> Result<Scaled>,
        _: impl FnOnce(&InNode) -> Result<InNode>,
    ) -> Result<Self> {
        plain(self)
    }

    fn by_kind_many(
        &self,
        plain: impl FnOnce(&Tensor) -> Result<Vec<Tensor>>,
        _: impl FnOnce(&Scaled) -> Result<Vec<Scaled>>,
        _: impl FnOnce(&InNode) -> Result<Vec<InNode>>,
    ) -> Result<Vec<Self>> {
        plain(self)
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

    fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
        Ok(ops::attention(q, k, v, options)?)
    }
}

impl Sealed for Scaled {}

impl Array for Scaled {
    fn dims(&self) -> &[usize] {
        Scaled::dims(self)
    }

    fn device(&self) -> &Device {
        Scaled::device(self)
    }

    fn value(&self) -> Result<Tensor> {
        Ok(self.to_tensor(DType::F32)?)
    }

    fn by_kind(
        &self,
        _: impl FnOnce(&Tensor) -> Result<Tensor>,
        scaled: impl FnOnce(&Scaled) -> Result<Scaled>,
        _: impl FnOnce(&InNode) -> Result<InNode>,
    ) -> Result<Self> {
        scaled(self)
    }

    fn by_kind_many(
        &self,
        _: impl FnOnce(&Tensor) -> Result<Vec<Tensor>>,
        scaled: impl FnOnce(&Scaled) -> Result<Vec<Scaled>>,
        _: impl FnOnce(&InNode) -> Result<Vec<InNode>>,
    ) -> Result<Vec<Self>> {
        scaled(self)
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

    fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
        Ok(Scaled::attention(q, k, v, options)?)
    }
}

impl Sealed for InNode {}

impl Array for InNode {
    fn dims(&self) -> &[usize] {
        InNode::dims(self)
    }

    fn device(&self) -> &Device {
        InNode::device(self)
    }

    fn value(&self) -> Result<Tensor> {
        Ok(self.tensor()?.to_dtype(DType::F32)?)
    }

    fn by_kind(
        &self,
        _: impl FnOnce(&Tensor) -> Result<Tensor>,
        _: impl FnOnce(&Scaled) -> Result<Scaled>,
        in_node: impl FnOnce(&Self) -> Result<Self>,
    ) -> Result<Self> {
        in_node(self)
    }

    fn by_kind_many(
        &self,
        _: impl FnOnce(&Tensor) -> Result<Vec<Tensor>>,
        _: impl FnOnce(&Scaled) -> Result<Vec<Scaled>>,
        in_node: impl FnOnce(&Self) -> Result<Vec<Self>>,
    ) -> Result<Vec<Self>> {
        in_node(self)
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
