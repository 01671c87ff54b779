//! The kernels of `kernels/*.cu`: their names, and their parameters.

use crate::base::activation::Activation;
use crate::base::check::float_error;
use crate::base::error::Result;
use candle_core::DType;

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// A file with kernels.
#[derive(Debug)]
pub(crate) struct Module {
    pub(super) name: &'static str,
    /// The architecture that the PTX is for, and its text.
    pub(super) ptx: (&'static str, &'static str),
    /// Architectures and machine code for them, which is empty where the build had no assembler for it.
    pub(super) cubins: &'static [(&'static str, &'static [u8])],
    /// What the assembler says of the kernels for Hopper, if they are built.
    #[cfg(test)]
    pub(super) resources: &'static str,
}

/// A kernel and its parameters: `p` a device pointer, `l` a u64, `i` a 32-bit integer, `f` an f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    pub(crate) module: &'static Module,
    pub(crate) name: &'static str,
    pub(crate) parameters: &'static str,
}

/// One kernel for each of f32, bf16 and f16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FloatKernels(pub(crate) [Kernel; 3]);

impl FloatKernels {
    /// The kernel of `dtype`.
    pub(crate) fn of(&self, op: &'static str, dtype: DType) -> Result<&Kernel> {
        match dtype {
            DType::F32 => Ok(&self.0[0]),
            DType::BF16 => Ok(&self.0[1]),
            DType::F16 => Ok(&self.0[2]),
            got => Err(float_error(op, "a tensor on a CUDA device", got)),
        }
    }
}

/// One kernel for each activation, in the order of the enum, and dtype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActivationKernels(pub(crate) [Kernel; 39]);

impl ActivationKernels {
    /// The kernels of `activation`.
    pub(crate) fn of(&self, activation: Activation) -> FloatKernels {
        let first = 3 * activation as usize;
        FloatKernels([self.0[first], self.0[first + 1], self.0[first + 2]])
    }
}

/// Declares the kernels of one module: `NAME = one "fp8_name"("ppl");`, or `floats` for `fp8_name_f32`, `_bf16` and `_f16`, or
/// `activations` for three such kernels of each activation, `fp8_name_gelu_f32` and so on.
/// A test compares the list of all of them with the PTX.
macro_rules! kernels {
    ($list:ident in $module:ident; $($name:ident = $kind:ident $function:literal($parameters:literal);)*) => {
        $(pub(crate) const $name: kernels!(@type $kind) = kernels!(@value $kind $module $function $parameters);)*
        #[cfg(test)]
        pub(crate) const $list: &[&[$crate::device::cuda::kernels::Kernel]] = &[$(kernels!(@list $kind $name)),*];
    };
    (@type one) => { $crate::device::cuda::kernels::Kernel };
    (@type floats) => { $crate::device::cuda::kernels::FloatKernels };
    (@type activations) => { $crate::device::cuda::kernels::ActivationKernels };
    (@value one $module:ident $function:literal $parameters:literal) => {
        $crate::device::cuda::kernels::Kernel {
            module: &$crate::device::cuda::kernels::$module,
            name: $function,
            parameters: $parameters,
        }
    };
    (@value floats $module:ident $function:literal $parameters:literal) => {
        $crate::device::cuda::kernels::FloatKernels([
            kernels!(@named $module $parameters $function "_f32"),
            kernels!(@named $module $parameters $function "_bf16"),
            kernels!(@named $module $parameters $function "_f16"),
        ])
    };
    (@value activations $module:ident $function:literal $parameters:literal) => {
        kernels!(@each $module $function $parameters "_gelu" "_gelu_erf" "_qgelu" "_relu" "_srelu" "_silu" "_glu" "_geglu"
            "_geglu_erf" "_qgeglu" "_reglu" "_sreglu" "_swiglu")
    };
    (@each $module:ident $function:literal $parameters:literal $($activation:literal)*) => {
        $crate::device::cuda::kernels::ActivationKernels([$(
            kernels!(@named $module $parameters $function $activation "_f32"),
            kernels!(@named $module $parameters $function $activation "_bf16"),
            kernels!(@named $module $parameters $function $activation "_f16"),
        )*])
    };
    (@named $module:ident $parameters:literal $($part:literal)*) => {
        $crate::device::cuda::kernels::Kernel {
            module: &$crate::device::cuda::kernels::$module,
            name: concat!($($part),*),
            parameters: $parameters,
        }
    };
    (@list one $name:ident) => { &[$name] };
    (@list floats $name:ident) => { &$name.0 };
    (@list activations $name:ident) => { &$name.0 };
}
pub(crate) use kernels;

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    /// A device pointer, 0 for none.
    Ptr(u64),
    /// A u64.
    Len(u64),
    /// A 32-bit integer.
    Int(u32),
    /// An f32.
    Float(f32),
}

impl Arg {
    pub(super) fn letter(self) -> char {
        match self {
            Self::Ptr(_) => 'p',
            Self::Len(_) => 'l',
            Self::Int(_) => 'i',
            Self::Float(_) => 'f',
        }
    }
}

/// The arguments of a launch, each after its letter in the declaration of the kernel; `i` takes a bool too. `a` stands before a
/// value that is an [`Arg`] already.
macro_rules! args {
    ($($letter:ident $value:expr),+ $(,)?) => {
        [$($crate::device::cuda::kernels::args!(@$letter $value)),+]
    };
    (@p $value:expr) => { $crate::device::cuda::kernels::Arg::Ptr($value) };
    (@l $value:expr) => { $crate::device::cuda::kernels::Arg::Len($value as u64) };
    (@i $value:expr) => { $crate::device::cuda::kernels::Arg::Int(u32::from($value)) };
    (@f $value:expr) => { $crate::device::cuda::kernels::Arg::Float($value) };
    (@a $value:expr) => { $value };
}
pub(crate) use args;

/// The blocks of a launch, their threads, and bytes of dynamic shared memory (above 48 KiB the limit is raised).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: (u32, u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
    /// Whether to launch only as many blocks as are resident at once: others would start when the first have ended, and leave
    /// most of the chip idle at the end. For kernels with a grid-stride loop.
    pub(crate) resident: bool,
}

impl Shape {
    /// `blocks` blocks of `threads` threads.
    pub(crate) fn blocks(blocks: usize, threads: u32) -> Self {
        Self::grid(blocks, 1, threads)
    }

    /// `x` times `y` blocks; `y` at most 65535.
    pub(crate) fn grid(x: usize, y: usize, threads: u32) -> Self {
        let clamp = |blocks: usize, most: u32| u32::try_from(blocks).unwrap_or(most).clamp(1, most);
        Self {
            grid: (clamp(x, i32::MAX as u32), clamp(y, 65535), 1),
            threads,
            shared: 0,
            resident: false,
        }
    }

    /// Enough blocks of 256 threads for `items`, or as many as fill the chip, where each thread takes several items: for
    /// kernels with a grid-stride loop.
    pub(crate) fn stride(items: usize) -> Self {
        const THREADS: usize = 256;
        Self {
            resident: true,
            ..Self::blocks(items.div_ceil(THREADS), THREADS as u32)
        }
    }
}
