//! The pass of a formula over a parameter, its gradient, its moments and its master: pieces are widened to f32, updated, rounded, and
//! written back.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Var, bail};
use fp8_candle::parallel::{self, vectorized};
use fp8_core::StochasticKey;
use half::{bf16, f16};

use super::super::rule::{MAX_MOMENTS, Rule};
use super::slice::{PIECE, Slice};
use super::value::{HostValues, Value};

/// Elements of one task. The update is elementwise and random bits follow from an element's index, so the split changes no bit.
const BLOCK: usize = 1 << 14;

/// Stochastic rounding of the results; None: to nearest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keys {
    /// The master, or the parameter if it has no master.
    pub(crate) parameter: Option<StochasticKey>,
    pub(crate) moments: [Option<StochasticKey>; MAX_MOMENTS],
}

/// The operands of a pass beside the parameter.
pub(crate) struct Pass<'a> {
    pub(crate) grad: Slice<'a>,
    /// Moments that the formula uses, in the dtype of the parameter if `saturating`, else in f32.
    pub(crate) moments: [Option<&'a mut HostValues>; MAX_MOMENTS],
    pub(crate) master: Option<&'a mut HostValues>,
    pub(crate) keys: Keys,
    /// Whether results beyond the range of their dtype become its largest number and are counted, and magnitudes are measured.
    pub(crate) saturating: bool,
}

/// What a saturating pass has measured.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measured {
    /// The largest magnitude of the parameter.
    pub(crate) parameter: f32,
    /// The largest magnitudes of the moments.
    pub(crate) moments: [f32; MAX_MOMENTS],
    /// Elements of all of them that were beyond the range of their dtype.
    pub(crate) saturated: u64,
}

/// Runs `formula` over a parameter in place.
pub(crate) fn run<R: Rule>(
    var: &Var,
    pass: Pass<'_>,
    formula: impl Fn(f32, f32, &mut [f32]) -> f32 + Sync,
) -> Result<Measured> {
    let op = Op::<R, _> {
        formula,
        pass: RefCell::new(pass),
        measured: RefCell::default(),
        rule: PhantomData,
    };
    if var.elem_count() > 0 {
        var.inplace_op1(&op)?;
    }
    Ok(op.measured.into_inner())
}

struct Op<'a, R, F> {
    formula: F,
    pass: RefCell<Pass<'a>>,
    measured: RefCell<Measured>,
    rule: PhantomData<R>,
}

impl<R: Rule, F: Fn(f32, f32, &mut [f32]) -> f32 + Sync> InplaceOp1 for Op<'_, R, F> {
    fn name(&self) -> &'static str {
        "optimizer"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{}: the variable must be contiguous", self.name())
        };
        let range = start..end;
        let measured = match storage {
            CpuStorage::F16(_) => self.typed::<f16>(storage, range),
            CpuStorage::BF16(_) => self.typed::<bf16>(storage, range),
            _ => self.typed::<f32>(storage, range),
        };
        match measured {
            None => bail!(
                "{}: variable, gradient, moments and master do not fit each other",
                self.name()
            ),
            Some(measured) => *self.measured.borrow_mut() = measured,
        }
        Ok(())
    }
}

impl<R: Rule, F: Fn(f32, f32, &mut [f32]) -> f32 + Sync> Op<'_, R, F> {
    fn typed<T: Value>(
        &self,
        storage: &mut CpuStorage,
        range: std::ops::Range<usize>,
    ) -> Option<Measured> {
        let parameter = T::of_storage(storage)?.get_mut(range)?;
        let pass = &mut *self.pass.borrow_mut();
        match (pass.saturating, &pass.master) {
            (true, _) => self.blocks::<T, T, f32>(parameter, pass),
            (false, None | Some(HostValues::F32(_))) => self.blocks::<T, f32, f32>(parameter, pass),
            (false, Some(HostValues::Bf16(_))) => self.blocks::<T, f32, bf16>(parameter, pass),
            (false, Some(HostValues::F16(_))) => self.blocks::<T, f32, f16>(parameter, pass),
        }
    }

    /// `T`: parameter, `M`: moments, `K`: master.
    fn blocks<T: Value, M: Value, K: Value>(
        &self,
        parameter: &mut [T],
        pass: &mut Pass<'_>,
    ) -> Option<Measured> {
        let len = parameter.len();
        let moments = pass.moments.iter().flatten().map(|moment| moment.len());
        let master = pass.master.iter().map(|master| master.len());
        let mut lengths = moments.chain(master).chain([pass.grad.len()]);
        if lengths.any(|other| other != len) {
            return None;
        }
        let mut moments: [_; MAX_MOMENTS] = Default::default();
        for (chunks, moment) in moments.iter_mut().zip(&mut pass.moments) {
            if let Some(moment) = moment {
                *chunks = Some(M::of_values(moment)?.chunks_mut(BLOCK));
            }
        }
        let mut master = match &mut pass.master {
            Some(master) => Some(K::of_values(master)?.chunks_mut(BLOCK)),
            None => None,
        };
        let blocks = parameter.chunks_mut(BLOCK).enumerate();
        let mut blocks: Vec<_> = blocks
            .map(|(block, parameter)| Block::<T, M, K> {
                start: block * BLOCK,
                parameter,
                moments: moments.each_mut().map(|chunks| chunks.as_mut()?.next()),
                master: master.as_mut().and_then(Iterator::next),
            })
            .collect();
        let (formula, grad) = (&self.formula, pass.grad);
        let (keys, saturating) = (pass.keys, pass.saturating);
        let update =
            |block: &mut Block<'_, T, M, K>| block.update::<R>(formula, grad, keys, saturating);
        let magnitudes = match blocks.as_mut_slice() {
            // Without the thread pool.
            [only] => update(only),
            blocks => (parallel::map(blocks, update).into_iter())
                .fold(Magnitudes::default(), Magnitudes::and),
        };
        Some(Measured {
            parameter: T::of_magnitude(magnitudes.parameter),
            moments: magnitudes.moments.map(M::of_magnitude),
            saturated: magnitudes.saturated,
        })
    }
}

/// The work of one task.
struct Block<'a, T, M, K> {
    /// Number of the first element.
    start: usize,
    parameter: &'a mut [T],
    moments: [Option<&'a mut [M]>; MAX_MOMENTS],
    master: Option<&'a mut [K]>,
}

/// As [`Measured`], in [`Value::magnitude`].
#[derive(Clone, Copy, Default)]
struct Magnitudes {
    parameter: u32,
    moments: [u32; MAX_MOMENTS],
    saturated: u64,
}

impl Magnitudes {
    fn and(mut self, other: Self) -> Self {
        self.parameter = self.parameter.max(other.parameter);
        for (max, other) in self.moments.iter_mut().zip(other.moments) {
            *max = (*max).max(other);
        }
        self.saturated += other.saturated;
        self
    }
}

impl<T: Value, M: Value, K: Value> Block<'_, T, M, K> {
    fn update<R: Rule>(
        &mut self,
        formula: &impl Fn(f32, f32, &mut [f32]) -> f32,
        grad: Slice<'_>,
        keys: Keys,
        saturating: bool,
    ) -> Magnitudes {
        let (mut grads, mut wide) = ([0f32; PIECE], [0f32; PIECE]);
        let mut wide_moments = [[0f32; PIECE]; MAX_MOMENTS];
        let mut total = Magnitudes::default();
        let len = self.parameter.len();
        for from in (0..len).step_by(PIECE) {
            let range = from..(from + PIECE).min(len);
            let (first, count) = (self.start + from, range.len());
            let grads = grad.widened(first, &mut grads[..count]);
            let wide = &mut wide[..count];
            let own = &mut self.parameter[range.clone()];
            let mut master = self
                .master
                .as_mut()
                .map(|master| &mut master[range.clone()]);
            let used = self.moments.each_ref().map(Option::is_some);
            // The operands in f32: memory of their own where they are f32, else scratch.
            let p = match &master {
                Some(master) => {
                    current(own, master, wide);
                    &mut *wide
                }
                None => T::widened(own, wide),
            };
            let mut pairs = self.moments.iter_mut().zip(&mut wide_moments);
            let mut m: [&mut [f32]; MAX_MOMENTS] = std::array::from_fn(|_| match pairs.next() {
                Some((Some(moment), wide)) => {
                    M::widened(&mut moment[range.clone()], &mut wide[..count])
                }
                Some((None, wide)) => &mut wide[..count],
                None => &mut [],
            });
            vectorized(
                #[inline(always)]
                || elements::<R>(formula, p, grads, &mut m),
            );
            let mut this = Magnitudes::default();
            if saturating {
                this.saturated = saturated::<T>(p);
                for (wide, _) in m.iter().zip(used).filter(|(_, used)| *used) {
                    this.saturated += saturated::<M>(wide);
                }
            }
            match &mut master {
                Some(master) => {
                    K::round(wide, master, first as u64, keys.parameter);
                    for (theta, master) in own.iter_mut().zip(&**master) {
                        *theta = T::narrow(master.widen());
                    }
                }
                None => T::put_back(own, wide, first as u64, keys.parameter, saturating),
            }
            for (i, (moment, wide)) in self.moments.iter_mut().zip(&wide_moments).enumerate() {
                let Some(moment) = moment else { continue };
                let moment = &mut moment[range.clone()];
                M::put_back(
                    moment,
                    &wide[..count],
                    first as u64,
                    keys.moments[i],
                    saturating,
                );
                if saturating {
                    this.moments[i] = largest(moment);
                }
            }
            if saturating {
                this.parameter = largest(own);
            }
            total = total.and(this);
        }
        total
    }
}

/// The value that the step of each element starts from: its master's, unless somebody has written to the variable, so that it is no longer
/// its master rounded.
fn current<T: Value, K: Value>(parameter: &[T], master: &[K], wide: &mut [f32]) {
    for ((wide, theta), master) in wide.iter_mut().zip(parameter).zip(master) {
        let master = master.widen();
        *wide = match T::narrow(master).same_bits(*theta) {
            true => master,
            false => theta.widen(),
        };
    }
}

fn largest<T: Value>(values: &[T]) -> u32 {
    vectorized(
        #[inline(always)]
        || T::largest(values),
    )
}

fn saturated<T: Value>(wide: &[f32]) -> u64 {
    let count = |count, x: &f32| count + u32::from(x.abs() > T::LARGEST);
    vectorized(
        #[inline(always)]
        || u64::from(wide.iter().fold(0, count)),
    )
}

/// The formula for each element. A loop for each number of moments, so that every one vectorizes.
#[inline(always)]
fn elements<R: Rule>(
    formula: &impl Fn(f32, f32, &mut [f32]) -> f32,
    p: &mut [f32],
    g: &[f32],
    moments: &mut [&mut [f32]; MAX_MOMENTS],
) {
    let [a, b, c] = moments;
    match const { R::MOMENTS.len() } {
        0 => {
            for (p, g) in p.iter_mut().zip(g) {
                *p = formula(*p, *g, &mut []);
            }
        }
        1 => {
            for ((p, g), a) in p.iter_mut().zip(g).zip(a.iter_mut()) {
                let mut m = [*a];
                *p = formula(*p, *g, &mut m);
                [*a] = m;
            }
        }
        2 => {
            for (((p, g), a), b) in p.iter_mut().zip(g).zip(a.iter_mut()).zip(b.iter_mut()) {
                let mut m = [*a, *b];
                *p = formula(*p, *g, &mut m);
                [*a, *b] = m;
            }
        }
        _ => {
            let moments = a.iter_mut().zip(b.iter_mut()).zip(c.iter_mut());
            for ((p, g), ((a, b), c)) in p.iter_mut().zip(g).zip(moments) {
                let mut m = [*a, *b, *c];
                *p = formula(*p, *g, &mut m);
                [*a, *b, *c] = m;
            }
        }
    }
}
