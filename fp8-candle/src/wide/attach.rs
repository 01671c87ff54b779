//! A computed result as a node of candle's graph with any number of arguments.
//!
//! A custom op of candle has three arguments at most. The first argument of a wide node is an argument of its op; the others
//! are bundled by threes into ops whose results, the tokens, have no elements of interest: one zero each. The node's op has
//! the last token as its second argument. In the backward pass the node's op comes first: it computes all gradients, returns
//! that of its first argument, and lays the others into a box, from which the bundles return them one after the other.

use super::collect;
use crate::error::Result;
use crate::ready::{Ready, owned_storage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Shape, Tensor,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// The gradients of all arguments.
type Gradients = Vec<Option<Tensor>>;

type Compute = dyn Fn(&Tensor) -> Result<Gradients> + Send + Sync;

/// Gradients on their way to the bundles, by the thread whose backward pass it is.
#[derive(Default)]
struct Letters(Mutex<HashMap<ThreadId, Gradients>>);

impl Letters {
    fn lay(&self, gradients: Gradients) {
        let mut letters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        letters.insert(thread::current().id(), gradients);
    }

    fn take(&self, index: usize) -> Option<Tensor> {
        let mut letters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = thread::current().id();
        let gradients = letters.get_mut(&here)?;
        let taken = gradients.get_mut(index).and_then(Option::take);
        if gradients.iter().all(Option::is_none) {
            letters.remove(&here);
        }
        taken
    }
}

struct Node {
    name: &'static str,
    ready: Ready,
    compute: Box<Compute>,
    /// The arguments; variables among them may be collected.
    arguments: Vec<Tensor>,
    letters: Arc<Letters>,
}

/// `result`, a detached tensor, as a node whose arguments are `arguments`; `backward` gives the gradient of each.
pub(super) fn attach(
    name: &'static str,
    result: Tensor,
    arguments: &[Tensor],
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    let Some((first, others)) = arguments.split_first() else {
        return Ok(result);
    };
    let letters = Arc::new(Letters::default());
    let node = Node {
        name,
        ready: Ready::new(owned_storage(&result)?, result.shape())?,
        compute: Box::new(backward),
        arguments: arguments.to_vec(),
        letters: letters.clone(),
    };
    let mut token: Option<Tensor> = None;
    let mut index = 1;
    let mut rest = others;
    while !rest.is_empty() {
        let zero = Tensor::zeros(1, candle_core::DType::F32, result.device())?;
        let take = if token.is_some() { 2 } else { 3 };
        let (now, later) = rest.split_at(take.min(rest.len()));
        let bundle = Bundle {
            first: index,
            with_token: token.is_some(),
            ready: Ready::new(owned_storage(&zero)?, 1)?,
            letters: letters.clone(),
        };
        let args: Vec<&Tensor> = token.iter().chain(now).collect();
        token = Some(match *args {
            [a] => a.apply_op1(bundle)?,
            [a, b] => a.apply_op2(b, bundle)?,
            [a, b, c] => a.apply_op3(b, c, bundle)?,
            _ => crate::error::internal!("{name}: a bundle of {} arguments", args.len()),
        });
        index += now.len();
        rest = later;
    }
    match token {
        None => Ok(first.apply_op1(node)?),
        Some(token) => Ok(first.apply_op2(&token, node)?),
    }
}

impl Node {
    /// The gradient of the first argument; the others are laid into the box or collected.
    fn backward(&self, grad: &Tensor) -> Result<Option<Tensor>> {
        let mut gradients = (self.compute)(grad)?;
        for (argument, gradient) in self.arguments.iter().zip(&mut gradients) {
            collect::offer(argument, gradient)?;
            if gradient.is_none() && !argument.is_variable() {
                // candle asks for the gradient of every tensor that was computed.
                *gradient = Some(argument.zeros_like()?);
            }
        }
        let mut first = None;
        if let Some(gradient) = gradients.first_mut() {
            first = gradient.take();
        }
        if gradients.iter().any(Option::is_some) {
            self.letters.lay(gradients);
        }
        Ok(first)
    }
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(self.backward(grad)?)
    }
}

impl CustomOp2 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        token: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        // candle visits the bundles only if their tokens have a gradient.
        Ok((self.backward(grad)?, Some(token.zeros_like()?)))
    }
}

/// Arguments of a node beyond its first, behind those of the token before.
struct Bundle {
    /// The place of the first of them among the node's arguments.
    first: usize,
    with_token: bool,
    ready: Ready,
    letters: Arc<Letters>,
}

impl Bundle {
    fn gradient(&self, place: usize, token: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match (self.with_token, place) {
            (true, 0) => Ok(Some(token.zeros_like()?)),
            (true, place) => Ok(self.letters.take(self.first + place - 1)),
            (false, place) => Ok(self.letters.take(self.first + place)),
        }
    }
}

impl CustomOp1 for Bundle {
    fn name(&self) -> &'static str {
        "bundle"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(&self, a: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.gradient(0, a)
    }
}

impl CustomOp2 for Bundle {
    fn name(&self) -> &'static str {
        "bundle"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(
        &self,
        a: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.gradient(0, a)?, self.gradient(1, a)?))
    }
}

impl CustomOp3 for Bundle {
    fn name(&self) -> &'static str {
        "bundle"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(
        &self,
        a: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = |place| self.gradient(place, a);
        Ok((gradient(0)?, gradient(1)?, gradient(2)?))
    }
}
