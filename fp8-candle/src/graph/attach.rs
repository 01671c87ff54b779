//! The one adaptor between operations and candle's custom ops.
//!
//! A custom op of candle has three arguments at most. A node with more has two: its first argument and a *token*. The other
//! arguments are bundled by threes into ops whose results, the tokens, hold a single zero; each bundle after the first takes the
//! token before it. In the backward pass candle visits the node first: it computes all gradients, returns that of its first
//! argument, and leaves the others in a box, from which the bundles return them.

use super::collect::{offer, tell};
use super::links::{Inbox, Link, Linked, link_of};
use crate::base::data::storage::{check_len, owned_storage, tensor_of};
use crate::base::error::{Result, internal};
use crate::base::sync::lock;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Shape,
    Storage, Tensor,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, ThreadId};

/// A forward result that is computed before its node exists; the node's forward pass only hands it over, once.
pub(crate) struct Ready {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Ready {
    /// # Errors
    /// If `storage` does not hold the values of `shape`.
    pub(crate) fn new(storage: Storage, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        check_len(&storage, &shape)?;
        Ok(Self {
            storage: Mutex::new(Some(storage)),
            shape,
        })
    }

    /// A copy of the values of `x`.
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        Self::new(owned_storage(x)?, x.shape())
    }

    fn take(&self) -> Option<Storage> {
        lock(&self.storage).take()
    }

    fn dtype(&self) -> Result<DType> {
        match lock(&self.storage).as_ref() {
            Some(storage) => Ok(storage.dtype()),
            None => internal!("the result of this node was taken before"),
        }
    }

    pub(crate) fn take_cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.take() {
            Some(Storage::Cpu(storage)) => Ok((storage, self.shape.clone())),
            _ => {
                candle_core::bail!("the result of this node is not on the CPU or was taken before")
            }
        }
    }

    pub(crate) fn take_cuda(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.take() {
            Some(Storage::Cuda(storage)) => Ok((storage, self.shape.clone())),
            _ => candle_core::bail!("the result of this node is not on CUDA or was taken before"),
        }
    }

    /// The result as a tensor outside any graph.
    pub(crate) fn into_tensor(self) -> Result<Tensor> {
        match self.take() {
            Some(storage) => tensor_of(storage, self.shape),
            None => internal!("the result of this node was taken before"),
        }
    }
}

/// One gradient per argument.
type Gradients = Vec<Gradient>;

type Gradient = Option<Tensor>;

/// Computes the gradients of the arguments from the arguments, the result and its gradient.
type Backward = dyn Fn(&[&Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync;

/// `result` as a tensor of candle's graph that depends on `args`; `backward` computes their gradients from the arguments, the
/// result and the gradient of the result. Where no argument is part of a graph, neither is the result.
///
/// A gradient has the shape and dtype of its argument. `None` stands for zeros.
pub(crate) fn attach<const N: usize>(
    name: &'static str,
    args: [&Tensor; N],
    result: Ready,
    backward: impl Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]>
    + Send
    + Sync
    + 'static,
) -> Result<Tensor> {
    attach_all(
        name,
        &args,
        result,
        move |args, result, grad| match <[&Tensor; N]>::try_from(args) {
            Ok(args) => Ok(backward(args, result, grad)?.into()),
            Err(_) => internal!("{name}: {} arguments of {N}", args.len()),
        },
    )
}

/// `result` as a tensor of candle's graph that depends on `argument`: for operations that this crate does not have. `backward` computes
/// the gradient of the argument, in its shape and dtype, from that of the result.
///
/// # Errors
/// If `result` cannot be read. Errors of `backward` end the backward pass.
///
/// ```
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
/// let tripled = (x.as_detached_tensor() * 3.)?;
/// let y = fp8_candle::wide::node("triple", &x, &tripled, |grad| Ok((grad * 3.)?))?;
/// let grads = fp8_candle::wide::backward(&y.sum_all()?)?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [3., 3.]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn node(
    name: &'static str,
    argument: &Tensor,
    result: &Tensor,
    backward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    attach(
        name,
        [argument],
        Ready::of(&result.detach())?,
        move |_, _, grad| Ok([Some(backward(grad)?)]),
    )
}

/// [`attach`] with any number of arguments.
pub(crate) fn attach_all(
    name: &'static str,
    args: &[&Tensor],
    result: Ready,
    backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    attach_node(name, args, result, Box::new(backward))
}

/// [`attach_all`], compiled once for all operations.
fn attach_node(
    name: &'static str,
    args: &[&Tensor],
    result: Ready,
    backward: Box<Backward>,
) -> Result<Tensor> {
    if !args.iter().any(|arg| arg.track_op()) {
        return result.into_tensor();
    }
    let all: Vec<Tensor> = args.iter().map(|&arg| arg.clone()).collect();
    let gradients = move |result: &Tensor, grad: &Tensor| {
        let args: Vec<&Tensor> = all.iter().collect();
        complete(&args, backward(&args, result, grad).map_err(tell)?)
    };
    if !args.iter().all(|arg| arg.device().is_cpu()) {
        return operation(name, args, result, gradients);
    }
    let links: Vec<Option<Link>> = args.iter().map(|arg| link_of(arg)).collect();
    let given: Vec<Tensor> = (args.iter().zip(&links))
        .map(|(&arg, link)| link.as_ref().map_or(arg, |link| &link.tensor).clone())
        .collect();
    let inbox = Arc::new(Inbox::new(result.shape.clone(), result.dtype()?));
    // The values of the result, for the backward pass.
    let values = Arc::new(OnceLock::<Tensor>::new());
    let zero = Ready::of(&Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
    let tensor = {
        let (inbox, values) = (inbox.clone(), values.clone());
        let given: Vec<&Tensor> = given.iter().collect();
        operation(name, &given, zero, move |_, told| {
            let Some(values) = values.get() else {
                internal!("{name}: a node without a result");
            };
            let gradients = gradients(values, &inbox.take(told)?)?;
            let sent = gradients
                .into_iter()
                .zip(&links)
                .map(|(grad, link)| match link {
                    Some(link) => Ok(Some(link.inbox.put(grad).map_err(tell)?)),
                    None => Ok(grad),
                });
            sent.collect()
        })?
    };
    let linked = Arc::new(Linked::default());
    let op = {
        let (inbox, linked) = (inbox.clone(), linked.clone());
        Op::new(name, result, move |_, _, grad| {
            // Owned by the result's operation, so that the link ends with the result.
            let _ = &linked;
            Ok(vec![Some(inbox.put(Some(grad.clone()))?)])
        })
    };
    let result = op.apply(&[&tensor])?;
    let _ = values.set(result.detach());
    linked.begin(&result, Link { tensor, inbox });
    Ok(result)
}

/// A node of candle's graph; `backward` computes the gradients of `args` from the result and its gradient.
fn operation(
    name: &'static str,
    args: &[&Tensor],
    result: Ready,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if args.len() <= 3 {
        let op = Op::new(name, result, move |_, result, grad| backward(result, grad));
        return op.apply(args);
    }
    let deposits = Arc::new(Deposits::default());
    let (first, token) = (args[0], bundles(name, &args[1..], &deposits)?);
    let op = Op::new(name, result, move |given, result, grad| {
        let mut gradients = backward(result, grad)?.into_iter();
        let first = gradients.next().flatten();
        deposits.put(gradients.collect());
        // candle visits the bundles only if their tokens have a gradient.
        let token = given.last().map(|token| token.zeros_like()).transpose()?;
        Ok(vec![first, token])
    });
    op.apply(&[first, &token])
}

/// Collects the gradients of variables. Other arguments that were computed get zeros where they have no gradient, unless they have a
/// link: candle panics without one.
fn complete(args: &[&Tensor], mut gradients: Gradients) -> Result<Gradients> {
    for (&arg, gradient) in args.iter().zip(&mut gradients) {
        offer(arg, gradient).map_err(tell)?;
        let computed = arg.track_op() && !arg.is_variable();
        if gradient.is_none() && computed && link_of(arg).is_none() {
            *gradient = Some(arg.zeros_like()?);
        }
    }
    Ok(gradients)
}

/// The last token of bundles of `args`.
fn bundles(name: &'static str, args: &[&Tensor], deposits: &Arc<Deposits>) -> Result<Tensor> {
    let (mut token, mut done): (Option<Tensor>, usize) = (None, 0);
    while done < args.len() {
        let (first, with_token) = (done, usize::from(token.is_some()));
        let now = &args[done..args.len().min(done + 3 - with_token)];
        let zero = Tensor::zeros(1, DType::F32, args[0].device())?;
        let deposits = deposits.clone();
        let bundle = Op::new("bundle", Ready::of(&zero)?, move |given, _, _| {
            let (token, args) = given.split_at(with_token);
            let zeros = token.iter().map(|token| Ok(Some(token.zeros_like()?)));
            let taken = (0..args.len()).map(|place| Ok(deposits.take(first + place)));
            zeros.chain(taken).collect()
        });
        let bundled: Vec<&Tensor> = token.iter().chain(now.iter().copied()).collect();
        done += now.len();
        token = Some(bundle.apply(&bundled)?);
    }
    match token {
        Some(token) => Ok(token),
        None => internal!("{name}: a bundle without arguments"),
    }
}

/// Gradients on their way to the bundles, by the thread of the backward pass.
#[derive(Default)]
struct Deposits(Mutex<HashMap<ThreadId, Gradients>>);

impl Deposits {
    fn put(&self, gradients: Gradients) {
        let (mut deposits, here) = (lock(&self.0), thread::current().id());
        match gradients.iter().any(Option::is_some) {
            true => deposits.insert(here, gradients),
            // What a pass that failed has left.
            false => deposits.remove(&here),
        };
    }

    fn take(&self, index: usize) -> Option<Tensor> {
        let mut deposits = lock(&self.0);
        let here = thread::current().id();
        let gradients = deposits.get_mut(&here)?;
        let taken = gradients.get_mut(index).and_then(Option::take);
        if gradients.iter().all(Option::is_none) {
            deposits.remove(&here);
        }
        taken
    }
}

/// A custom op of one, two or three arguments.
struct Op {
    name: &'static str,
    result: Ready,
    backward: Box<Backward>,
}

impl Op {
    fn new(
        name: &'static str,
        result: Ready,
        backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
    ) -> Self {
        let backward = Box::new(backward);
        Self {
            name,
            result,
            backward,
        }
    }

    fn apply(self, args: &[&Tensor]) -> Result<Tensor> {
        match *args {
            [a] => Ok(a.apply_op1(self)?),
            [a, b] => Ok(a.apply_op2(b, self)?),
            [a, b, c] => Ok(a.apply_op3(b, c, self)?),
            _ => internal!("{}: a custom op of {} arguments", self.name, args.len()),
        }
    }

    fn gradients<const N: usize>(
        &self,
        args: [&Tensor; N],
        result: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        match <[Option<Tensor>; N]>::try_from((self.backward)(&args, result, grad)?) {
            Ok(gradients) => Ok(gradients),
            Err(all) => internal!("{}: {} gradients of {N}", self.name, all.len()),
        }
    }
}

macro_rules! custom_op {
    ($CustomOp:ident: $($arg:ident),+ => $Gradients:ty) => {
        impl $CustomOp for Op {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(
                &self,
                $(_: custom_op!(@for $arg &CpuStorage), _: &Layout),+
            ) -> candle_core::Result<(CpuStorage, Shape)> {
                self.result.take_cpu()
            }

            fn cuda_fwd(
                &self,
                $(_: custom_op!(@for $arg &CudaStorage), _: &Layout),+
            ) -> candle_core::Result<(CudaStorage, Shape)> {
                self.result.take_cuda()
            }

            fn bwd(
                &self,
                $($arg: &Tensor,)+
                result: &Tensor,
                grad: &Tensor,
            ) -> candle_core::Result<$Gradients> {
                let [$($arg),+] = self.gradients([$($arg),+], result, grad)?;
                Ok(($($arg),+))
            }
        }
    };
    (@for $arg:ident $Type:ty) => { $Type };
}
custom_op!(CustomOp1: a => Gradient);
custom_op!(CustomOp2: a, b => (Gradient, Gradient));
custom_op!(CustomOp3: a, b, c => (Gradient, Gradient, Gradient));
