//! Values of a node of candle's graph that is being built.

use crate::autocast::current;
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use fp8_candle::ops::{Activation, AttentionOptions};
use fp8_candle::{Wide, WideNode};
use std::cell::RefCell;
use std::rc::Rc;

/// A value of a [`WideNode`] that is being built: the array on which a layer computes when it becomes a single node of candle's graph.
#[doc(hidden)]
#[derive(Clone)]
pub struct InNode {
    node: Rc<RefCell<WideNode>>,
    value: Wide,
    /// The sizes of this array if it is a view of `value` with dimensions 1 and 2 exchanged. Rotary positions and attention read
    /// tokens before heads, so the transpose that puts heads first is never computed.
    exchanged: Option<[usize; 4]>,
}

impl std::fmt::Debug for InNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("InNode").field(&self.dims()).finish()
    }
}

/// The error of a function within a node, as the error that the node returns.
pub(crate) fn passed_on(error: Error) -> fp8_candle::Error {
    match error {
        Error::Candle(error) => fp8_candle::Error::Candle(error),
        Error::Fp8(error) => error,
        error => fp8_candle::Error::Candle(candle_core::Error::wrap(error)),
    }
}

impl InNode {
    /// The result of `compute` for `x`, as one node of candle's graph.
    pub(crate) fn run(
        node: WideNode,
        x: &Tensor,
        compute: impl FnOnce(&Self) -> Result<Self>,
    ) -> Result<Tensor> {
        let node = Rc::new(RefCell::new(node));
        let value = node.borrow_mut().argument(x);
        let argument = Self {
            node: node.clone(),
            value,
            exchanged: None,
        };
        let result = compute(&argument)?;
        let y = result.in_order()?;
        drop((argument, result));
        let Ok(node) = Rc::try_unwrap(node) else {
            let message = "values of a node outlive its computation";
            return Err(candle_core::Error::Msg(message.into()).into());
        };
        let node = node.into_inner();
        if let Some(context) = current().filter(|context| context.kept_groups().is_some()) {
            context.note_kept(node.bytes_in_fp8());
        }
        Ok(node.finish(y)?)
    }

    /// Adds to the node the operations that `compute` applies to this value.
    pub(crate) fn operation<E>(
        &self,
        compute: impl FnOnce(&mut WideNode, &Wide) -> Result<Wide, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let value = self.in_order()?;
        let value = compute(&mut self.node.borrow_mut(), &value)?;
        Ok(self.with(value, None))
    }

    /// As [`InNode::operation`] with several results.
    pub(crate) fn operations<E>(
        &self,
        compute: impl FnOnce(&mut WideNode, &Wide) -> Result<Vec<Wide>, E>,
    ) -> Result<Vec<Self>>
    where
        Error: From<E>,
    {
        let value = self.in_order()?;
        let values = compute(&mut self.node.borrow_mut(), &value)?.into_iter();
        Ok(values.map(|value| self.with(value, None)).collect())
    }

    /// Applies `plain`, a pure function that candle differentiates, to values of one node.
    pub(super) fn opaque(
        parts: &[&Self],
        plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Self> {
        let [first, ..] = parts else {
            return Err(candle_core::Error::Msg("an operation without arguments".into()).into());
        };
        let values = parts.iter().map(|part| part.in_order());
        let values = values.collect::<Result<Vec<_>>>()?;
        let values: Vec<&Wide> = values.iter().collect();
        let plain = move |x: &[Tensor]| plain(x).map_err(passed_on);
        let value = first.node.borrow_mut().apply(&values, plain)?;
        Ok(first.with(value, None))
    }

    /// [`InNode::opaque`] of this value.
    pub(crate) fn function(
        &self,
        plain: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::opaque(&[self], move |x| plain(&x[0]))
    }

    /// The error of a layer that has no form inside a node.
    pub(crate) fn unsupported(&self, layer: &str) -> Result<Self> {
        let message = format!("{layer} cannot be part of a single node");
        Err(candle_core::Error::Msg(message).into())
    }

    fn with(&self, value: Wide, exchanged: Option<[usize; 4]>) -> Self {
        Self {
            node: self.node.clone(),
            value,
            exchanged,
        }
    }

    /// The value itself, transposed if this is a view.
    fn in_order(&self) -> Result<Wide> {
        if self.exchanged.is_none() {
            return Ok(self.value.clone());
        }
        let exchange = |x: &[Tensor]| Ok(x[0].transpose(1, 2)?.contiguous()?);
        Ok(self.node.borrow_mut().apply(&[&self.value], exchange)?)
    }

    /// Exchanges dimensions 1 and 2, without a copy where there are four.
    fn exchange(&self) -> Result<Self> {
        match (self.exchanged, self.value.dims()) {
            (Some(_), _) => Ok(self.with(self.value.clone(), None)),
            (None, &[a, b, c, d]) => Ok(self.with(self.value.clone(), Some([a, c, b, d]))),
            (None, _) => self.function(|x| Ok(x.transpose(1, 2)?)),
        }
    }

    /// The value with dimensions 1 and 2 exchanged.
    fn tokens_first(&self) -> Result<Wide> {
        self.exchange()?.in_order()
    }

    pub(super) fn transpose(&self, first: usize, second: usize) -> Result<Self> {
        match (first, second) {
            (1, 2) | (2, 1) => self.exchange(),
            _ => self.function(move |x| Ok(x.transpose(first, second)?)),
        }
    }

    pub(super) fn contiguous(&self) -> Result<Self> {
        Ok(self.clone())
    }

    pub(super) fn reshape(&self, dims: &[usize]) -> Result<Self> {
        self.operation(|node, x| node.reshape(x, dims))
    }

    pub(super) fn split(&self, sizes: &[usize]) -> Result<Vec<Self>> {
        self.operations(|node, x| node.split(x, sizes))
    }

    pub(super) fn rope(&self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        self.rotated(cos, sin, false)
    }

    pub(super) fn rope_i(&self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        self.rotated(cos, sin, true)
    }

    fn rotated(&self, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Self> {
        let value = self.tokens_first()?;
        let y = self.node.borrow_mut().rope(&value, cos, sin, interleaved)?;
        self.with(y, None).exchange()
    }

    pub(super) fn dropout(&self, p: f64, seed: u64) -> Result<Self> {
        self.operation(|node, x| node.dropout(x, p, seed))
    }

    pub(super) fn activation(&self, activation: Activation) -> Result<Self> {
        self.operation(|node, x| node.activation(x, activation))
    }

    pub(super) fn gated_activation(&self, value: &Self, activation: Activation) -> Result<Self> {
        let value = value.in_order()?;
        self.operation(|node, gate| node.gated_activation(gate, &value, activation))
    }

    pub(super) fn add(&self, other: &Self) -> Result<Self> {
        if self.dims() != other.dims() {
            return Self::opaque(&[self, other], |x| Ok(x[0].broadcast_add(&x[1])?));
        }
        let other = other.in_order()?;
        self.operation(|node, x| node.add(x, &other))
    }

    pub(super) fn attention(qkv: [&Self; 3], options: &AttentionOptions) -> Result<Self> {
        let [q, k, v] = qkv;
        let values = [q.tokens_first()?, k.tokens_first()?, v.tokens_first()?];
        let y = q.node.borrow_mut().attention(values.each_ref(), options)?;
        q.with(y, None).exchange()
    }

    pub(super) fn dims(&self) -> &[usize] {
        match &self.exchanged {
            Some(dims) => dims,
            None => self.value.dims(),
        }
    }

    pub(super) fn device(&self) -> &Device {
        self.value.device()
    }

    /// The value as a tensor.
    pub(super) fn tensor(&self) -> Result<Tensor> {
        Ok(self.in_order()?.tensor()?.clone())
    }
}
