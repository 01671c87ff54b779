//! The autograd nodes of fused ops.

use crate::error::Result;
use crate::profile::{Kind, enter};
use crate::ready::Ready;
use crate::wide::collect::offer;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Shape, Storage, Tensor,
};

/// A fused op of `N` tensors. All methods get contiguous arguments and do not see the graph; [`apply1`], [`apply2`] and
/// [`apply3`] put the op into it.
pub(super) trait Fused<const N: usize>: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// What its time counts as.
    fn kind(&self) -> Kind;

    /// Shape of the result.
    fn shape(&self, args: [&Tensor; N]) -> Shape {
        args.first()
            .map_or_else(|| Shape::from(()), |x| x.shape().clone())
    }

    /// The result, on the CPU.
    fn cpu_forward(&self, args: [&Tensor; N]) -> Result<Storage>;

    /// The gradients of the arguments that are part of a graph, on the CPU.
    fn cpu_backward(
        &self,
        args: [&Tensor; N],
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]>;

    /// The result, on a CUDA device. May keep in `self` what the backward pass needs.
    #[cfg(feature = "cuda")]
    fn cuda_forward(&mut self, args: [&Tensor; N]) -> Result<Storage>;

    /// The gradients of the arguments that are part of a graph, on a CUDA device.
    #[cfg(feature = "cuda")]
    fn cuda_backward(
        &self,
        args: [&Tensor; N],
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]>;
}

/// `op` of one tensor.
pub(super) fn apply1(op: impl Fused<1>, x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let node = Node::new(op, [&x])?;
    Ok(x.apply_op1(node)?)
}

/// `op` of two tensors.
pub(super) fn apply2(op: impl Fused<2>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let node = Node::new(op, [&x, &y])?;
    Ok(x.apply_op2(&y, node)?)
}

/// `op` of three tensors.
pub(super) fn apply3(op: impl Fused<3>, x: &Tensor, y: &Tensor, z: &Tensor) -> Result<Tensor> {
    let (x, y, z) = (x.contiguous()?, y.contiguous()?, z.contiguous()?);
    let node = Node::new(op, [&x, &y, &z])?;
    Ok(x.apply_op3(&y, &z, node)?)
}

/// An op with its result, which the node hands over.
struct Node<O> {
    op: O,
    result: Ready,
}

impl<O> Node<O> {
    #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
    fn new<const N: usize>(mut op: O, args: [&Tensor; N]) -> Result<Self>
    where
        O: Fused<N>,
    {
        let _scope = enter(op.kind());
        let storage = match args.first().map(|x| x.device()) {
            #[cfg(feature = "cuda")]
            Some(candle_core::Device::Cuda(_)) => op.cuda_forward(args)?,
            _ => {
                crate::simd::check()?;
                op.cpu_forward(args)?
            }
        };
        let result = Ready::new(storage, op.shape(args))?;
        Ok(Self { op, result })
    }

    fn backward<const N: usize>(
        &self,
        args: [&Tensor; N],
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]>
    where
        O: Fused<N>,
    {
        let _scope = enter(self.op.kind());
        let grad = grad.contiguous()?;
        let mut grads = match grad.device() {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => self.op.cuda_backward(args, res, &grad)?,
            _ => self.op.cpu_backward(args, res, &grad)?,
        };
        for (arg, grad) in args.into_iter().zip(&mut grads) {
            offer(arg, grad)?;
        }
        Ok(grads)
    }
}

impl<O: Fused<1>> CustomOp1 for Node<O> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.result.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.result.take_cuda()
    }

    fn bwd(&self, x: &Tensor, res: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let [dx] = self.backward([x], res, grad)?;
        Ok(dx)
    }
}

impl<O: Fused<2>> CustomOp2 for Node<O> {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.result.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.result.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dy] = self.backward([x, y], res, grad)?;
        Ok((dx, dy))
    }
}

impl<O: Fused<3>> CustomOp3 for Node<O> {
    fn name(&self) -> &'static str {
        self.op.name()
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
        self.result.take_cpu()
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
        self.result.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        z: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dy, dz] = self.backward([x, y, z], res, grad)?;
        Ok((dx, dy, dz))
    }
}
