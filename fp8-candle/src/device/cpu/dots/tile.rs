//! Tiles of sums in lanes: their definition, which is also the code for processors without kernels of their own.

use super::Plain;
use crate::base::math::Real;
use crate::base::simd::simd;
use half::{bf16, f16};
use std::marker::PhantomData;

/// Lanes of each sum.
pub(super) const LANES: usize = 16;

/// Kernels that add the lanes of sums to each other. Holding one is proof that the processor has its instructions.
pub(super) trait Tiles: Adds<<Self as Tiles>::Value, Sum = <Self as Tiles>::Value> {
    type Value: Plain + Real;

    const ZERO: Self::Value = Self::Value::ZERO;

    /// The most rows of x in a tile, and the rows of w in every tile.
    const ROWS: usize;
    const COLS: usize;

    /// The totals of lanes, `[sums][LANES]`: lanes l and l + 8 are added, then l and l + 4 of these, l and l + 2, l and l + 1.
    fn total(self, lanes: &[Self::Value], sums: &mut [Self::Value]);
}

/// Rows of w.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a, W> {
    pub(super) values: &'a [W],
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// How many elements ahead of what is read to prefetch; 0 for values in the cache.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "plain Rust does not prefetch")
    )]
    pub(super) ahead: usize,
}

/// Kernels that add products to lanes and read w in the type `W`, whose values they widen.
pub(super) trait Adds<W>: Copy + Send + Sync {
    /// The type of x and of the lanes.
    type Sum;

    /// Adds `steps` times [`LANES`] products to the lanes of `rows` rows of x and [`Tiles::COLS`] rows of w, which are 0 before
    /// unless `add`: lane by lane, in the order of the steps.
    ///
    /// `x`: rows and their distance. `lanes`: `[rows][COLS][LANES]`.
    fn add(
        self,
        rows: usize,
        x: (&[Self::Sum], usize),
        w: Weights<'_, W>,
        steps: usize,
        lanes: &mut [Self::Sum],
        add: bool,
    );
}

/// A type whose values are all exact in `V`.
pub(in super::super) trait Widen<V>: Copy + Send + Sync {
    fn widen(self) -> V;
}

impl<V: Copy + Send + Sync> Widen<V> for V {
    fn widen(self) -> V {
        self
    }
}

impl Widen<f32> for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Widen<f32> for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Checks that `rows` rows lie in `values`.
#[inline(always)]
pub(super) fn check_rows<V>((values, stride): (&[V], usize), rows: usize, steps: usize) {
    assert!(steps * LANES <= stride && (rows - 1) * stride + steps * LANES <= values.len());
}

/// Plain Rust, for any processor.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Portable<V>(PhantomData<V>);

/// `a * b + sum`, rounded once where the processor surely can.
#[inline(always)]
fn multiply_add<V: Real>(a: V, b: V, sum: V) -> V {
    if cfg!(target_arch = "aarch64") {
        a.mul_add(b, sum)
    } else {
        a * b + sum
    }
}

impl<V: Plain + Real, W: Widen<V>> Adds<W> for Portable<V> {
    type Sum = V;

    fn add(
        self,
        rows: usize,
        (x, x_stride): (&[V], usize),
        Weights {
            values: w,
            stride: w_stride,
            ..
        }: Weights<'_, W>,
        steps: usize,
        lanes: &mut [V],
        add: bool,
    ) {
        check_rows((x, x_stride), rows, steps);
        check_rows((w, w_stride), <Self as Tiles>::COLS, steps);
        let (lanes, _) = lanes.as_chunks_mut::<LANES>();
        let (lanes, _) = lanes.as_chunks_mut::<3>();
        simd(
            #[inline(always)]
            || {
                for (row, lanes) in lanes[..rows].iter_mut().enumerate() {
                    let x = x[row * x_stride..].as_chunks::<LANES>().0;
                    let w: [_; 3] = std::array::from_fn(|col| {
                        &w[col * w_stride..].as_chunks::<LANES>().0[..steps]
                    });
                    let mut sums = if add { *lanes } else { [[V::ZERO; LANES]; 3] };
                    for (step, x) in x[..steps].iter().enumerate() {
                        for (sums, w) in sums.iter_mut().zip(w) {
                            for ((sum, &x), &w) in sums.iter_mut().zip(x).zip(&w[step]) {
                                *sum = multiply_add(x, w.widen(), *sum);
                            }
                        }
                    }
                    *lanes = sums;
                }
            },
        );
    }
}

impl<V: Plain + Real> Tiles for Portable<V> {
    type Value = V;
    const ROWS: usize = 4;
    const COLS: usize = 3;

    fn total(self, lanes: &[V], sums: &mut [V]) {
        let (lanes, _) = lanes.as_chunks::<LANES>();
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = total(*lanes);
        }
    }
}

/// See [`Tiles::total`].
// Not inlined, or LLVM would arrange the lanes for the shuffles of this tree.
#[inline(never)]
pub(super) fn total<V: Real>(mut lanes: [V; LANES]) -> V {
    // One loop for each width, or they are loops with checks.
    for lane in 0..8 {
        lanes[lane] += lanes[lane + 8];
    }
    for lane in 0..4 {
        lanes[lane] += lanes[lane + 4];
    }
    for lane in 0..2 {
        lanes[lane] += lanes[lane + 2];
    }
    lanes[0] + lanes[1]
}
