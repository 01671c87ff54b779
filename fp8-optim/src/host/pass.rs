//! The pass of a formula over a parameter, its gradient, its moments and its master: pieces are widened to f32, updated, rounded, and
//! written back.

use candle_core::{DType, Error, Result, Tensor, Var};
use fp8_candle::parallel::{self, vectorized};
use fp8_core::{EXPANDED_BLOCK, StochasticKey, prefetch};
use half::{bf16, f16};

use super::super::memory::{Memory, change_in_place};
use super::super::moments::{DRAWN, Draw};
use super::super::rule::{MAX_MOMENTS, Rule};
use super::slice::{PIECE, Slice};
use super::stored::{Operand, Stored, blocks as blocks_of, elements};
use super::value::Value;

/// Elements of one task. The update is elementwise and random bits follow from an element's index, so the split changes no bit.
const BLOCK: usize = 1 << 14;

/// Elements of a piece if moments are coded: on a Xeon with AMX, 512 take 6% longer, and 128 more than 10%.
const CODED_PIECE: usize = 256;

/// The keys of stochastic rounding; None rounds to nearest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keys {
    /// The master, or the parameter if it has no master.
    pub(crate) parameter: Option<StochasticKey>,
    pub(crate) moments: [Option<StochasticKey>; MAX_MOMENTS],
}

/// The operands of a pass beside the parameter. Moments and master are updated in place.
pub(crate) struct Pass<'a> {
    pub(crate) grad: Slice<'a>,
    /// Moments that the formula uses.
    pub(crate) moments: Vec<Operand<'a>>,
    pub(crate) master: Option<&'a Tensor>,
    pub(crate) keys: Keys,
    /// Whether results beyond the range of their dtype become its largest number and are counted, and magnitudes are measured.
    pub(crate) saturating: bool,
}

/// What a saturating pass has measured: in a parameter, or in some of its elements.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measured {
    /// The largest magnitude of the parameter.
    pub(crate) parameter: f32,
    /// The largest magnitudes of the moments.
    pub(crate) moments: [f32; MAX_MOMENTS],
    /// Elements of all of them that were beyond the range of their dtype.
    pub(crate) saturated: u64,
}

/// The update of one element: from its value, gradient and moments to its new value. Loops run on a copy, whose numbers stay in registers:
/// behind a reference, the compiler must assume that stores of results change them, and a formula with branches would not vectorize.
pub(crate) trait Formula: Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync {}

impl<F: Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync> Formula for F {}

/// Runs `formula` over a parameter in place.
pub(crate) fn run<R: Rule>(var: &Var, pass: &Pass<'_>, formula: impl Formula) -> Result<Measured> {
    let mut measured = Some(Measured::default());
    let moments = pass.moments.iter().flat_map(|moment| moment.tensors());
    let tensors = std::iter::once(var.as_tensor()).chain(moments);
    let tensors: Vec<&Tensor> = tensors.chain(pass.master).collect();
    if var.elem_count() > 0 {
        change_in_place(&tensors, &mut |memory| {
            measured = match var.dtype() {
                DType::F16 => typed::<R, f16>(memory, pass, formula),
                DType::BF16 => typed::<R, bf16>(memory, pass, formula),
                _ => typed::<R, f32>(memory, pass, formula),
            };
            Ok(())
        })?;
    }
    let misfit = "variable, gradient, moments and master do not fit each other";
    measured.ok_or_else(|| Error::msg(misfit))
}

fn typed<R: Rule, T: Value>(
    memory: Vec<Memory<'_>>,
    pass: &Pass<'_>,
    formula: impl Formula,
) -> Option<Measured> {
    match (pass.saturating, pass.master.map(Tensor::dtype)) {
        (true, _) => blocks::<R, T, T, f32>(memory, pass, formula),
        (false, Some(DType::BF16)) => blocks::<R, T, f32, bf16>(memory, pass, formula),
        (false, Some(DType::F16)) => blocks::<R, T, f32, f16>(memory, pass, formula),
        (false, _) => blocks::<R, T, f32, f32>(memory, pass, formula),
    }
}

/// `T`: parameter, `M`: moments, `K`: master. None if dtypes or lengths do not fit.
fn blocks<R: Rule, T: Value, M: Value, K: Value>(
    memory: Vec<Memory<'_>>,
    pass: &Pass<'_>,
    formula: impl Formula,
) -> Option<Measured> {
    let len = pass.grad.len();
    let mut memory = memory.into_iter();
    let parameter = elements::<T>(memory.next(), len)?.chunks_mut(BLOCK);
    let mut moments: [_; MAX_MOMENTS] = Default::default();
    for (moment, operand) in moments.iter_mut().zip(&pass.moments) {
        let stored = Stored::<M>::open(*operand, &mut memory, len)?;
        *moment = Some(stored.parts(BLOCK).into_iter());
    }
    let mut master = match pass.master {
        Some(_) => Some(elements::<K>(memory.next(), len)?.chunks_mut(BLOCK)),
        None => None,
    };
    let blocks = parameter
        .enumerate()
        .map(|(block, parameter)| Block::<T, M, K> {
            start: block * BLOCK,
            parameter,
            moments: moments.each_mut().map(|chunks| chunks.as_mut()?.next()),
            master: master.as_mut().and_then(Iterator::next),
        });
    let parts = parallel::map(blocks, |mut block| block.update::<R>(formula, pass));
    Some(parts.into_iter().fold(Measured::default(), Measured::and))
}

/// The work of one task.
struct Block<'a, T, M, K> {
    /// Number of the first element.
    start: usize,
    parameter: &'a mut [T],
    moments: [Option<Stored<'a, M>>; MAX_MOMENTS],
    master: Option<&'a mut [K]>,
}

impl Measured {
    /// Of both parts. NaN counts as the largest magnitude.
    fn and(mut self, other: Self) -> Self {
        let larger = |a: f32, b: f32| f32::from_bits(a.to_bits().max(b.to_bits()));
        self.parameter = larger(self.parameter, other.parameter);
        for (max, other) in self.moments.iter_mut().zip(other.moments) {
            *max = larger(*max, other);
        }
        self.saturated += other.saturated;
        self
    }
}

impl<T: Value, M: Value, K: Value> Block<'_, T, M, K> {
    fn update<R: Rule>(&mut self, formula: impl Formula, pass: &Pass<'_>) -> Measured {
        let (keys, saturating) = (&pass.keys, pass.saturating);
        let (mut grads, mut wide) = ([0f32; PIECE], [0f32; PIECE]);
        let mut wide_moments = [[0f32; PIECE]; MAX_MOMENTS];
        const {
            assert!(
                CODED_PIECE <= PIECE
                    && PIECE <= DRAWN
                    && CODED_PIECE.is_multiple_of(EXPANDED_BLOCK)
            )
        }
        let mut draw = Draw::new();
        let mut total = Measured::default();
        let len = self.parameter.len();
        let is_coded =
            (self.moments.iter().flatten()).any(|moment| matches!(moment, Stored::Coded { .. }));
        let piece = if is_coded { CODED_PIECE } else { PIECE };
        // Codes and saturating passes have bounds of their own.
        let bound = match is_coded || saturating {
            true => f32::INFINITY,
            false => f32::MAX,
        };
        for from in (0..len).step_by(piece) {
            let range = from..(from + piece).min(len);
            let (first, count) = (self.start + from, range.len());
            let grads = pass.grad.widened(first, &mut grads[..count]);
            let first = first as u64;
            draw.start(first);
            let wide = &mut wide[..count];
            let (own, rest) = self.parameter[from..].split_at_mut(count);
            let master = self.master.as_mut();
            let mut master = master.map(|master| &mut master[range.clone()]);
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
                Some((Some(moment), wide)) => moment.widened(range.clone(), &mut wide[..count]),
                Some((None, wide)) => &mut wide[..count],
                None => &mut [],
            });
            vectorized(
                #[inline(always)]
                || each_element::<R>(formula, p, grads, &mut m, bound),
            );
            if is_coded {
                // Prefetches the next piece while moments are encoded.
                pass.grad
                    .prefetch(first as usize + piece..first as usize + 2 * piece);
                prefetch(&rest[..rest.len().min(piece)]);
            }
            let mut this = Measured::default();
            match &mut master {
                Some(master) => {
                    K::round(wide, master, first, keys.parameter);
                    for (theta, master) in own.iter_mut().zip(&**master) {
                        *theta = T::from_f32(master.to_f32());
                    }
                }
                None => {
                    (this.parameter, this.saturated) =
                        put_back(own, wide, first, keys.parameter, saturating);
                }
            }
            for (i, (moment, wide)) in self.moments.iter_mut().zip(&wide_moments).enumerate() {
                let wide = &wide[..count];
                match moment {
                    None => {}
                    Some(Stored::Values(values)) => {
                        let values = &mut values[range.clone()];
                        let (largest, saturated) =
                            put_back(values, wide, first, keys.moments[i], saturating);
                        this.moments[i] = largest;
                        this.saturated += saturated;
                    }
                    Some(Stored::Coded {
                        codes,
                        amaxes,
                        curves,
                        coding,
                    }) => {
                        let blocks = blocks_of(&range);
                        let (amaxes, curves) = (&mut amaxes[blocks.clone()], &mut curves[blocks]);
                        let outs = (&mut codes[range.clone()], amaxes, curves);
                        draw.encode(wide, *coding, outs);
                    }
                }
            }
            total = total.and(this);
        }
        total
    }
}

/// The value that the step of each element starts from: its master's, or its own if the variable was written to and so differs from the
/// rounded master.
fn current<T: Value, K: Value>(parameter: &[T], master: &[K], wide: &mut [f32]) {
    for ((wide, theta), master) in wide.iter_mut().zip(parameter).zip(master) {
        let master = master.to_f32();
        *wide = match T::from_f32(master).bits() == theta.bits() {
            true => master,
            false => theta.to_f32(),
        };
    }
}

/// [`Value::put_back`]. If `saturate`, returns the largest magnitude and how many results were beyond the range.
fn put_back<T: Value>(
    values: &mut [T],
    scratch: &[f32],
    first: u64,
    key: Option<StochasticKey>,
    saturate: bool,
) -> (f32, u64) {
    if !saturate {
        T::put_back(values, scratch, first, key, false);
        return (0.0, 0);
    }
    let results = T::results(values, scratch);
    let count = |count, x: &f32| count + u32::from(x.abs() > T::LARGEST);
    let saturated = vectorized(
        #[inline(always)]
        || u64::from(results.iter().fold(0, count)),
    );
    T::put_back(values, scratch, first, key, true);
    let largest = vectorized(
        #[inline(always)]
        || T::largest(values),
    );
    (T::of_bits(largest).to_f32(), saturated)
}

/// The formula for each element. A moment that has overflowed, as the square of a gradient of 2e19 does, keeps the largest number up to
/// `bound`. The number of moments is a constant, so that the loop vectorizes and leaves unused moments alone.
#[inline(always)]
fn each_element<R: Rule>(
    formula: impl Formula,
    p: &mut [f32],
    g: &[f32],
    [a, b, c]: &mut [&mut [f32]; MAX_MOMENTS],
    bound: f32,
) {
    let used = const { R::MOMENTS.len() };
    let moments = a.iter_mut().zip(b.iter_mut()).zip(c.iter_mut());
    for ((p, g), ((a, b), c)) in p.iter_mut().zip(g).zip(moments) {
        let mut m = [*a, *b, *c];
        *p = formula(*p, *g, &mut m[..used]);
        if used > 0 {
            *a = within(m[0], bound);
        }
        if used > 1 {
            *b = within(m[1], bound);
        }
        if used > 2 {
            *c = within(m[2], bound);
        }
    }
}

/// At most `bound` in magnitude; NaN stays NaN. A maximum and a minimum of vectors: `clamp` would check its arguments for each element.
#[inline(always)]
fn within(x: f32, bound: f32) -> f32 {
    let x = if x > bound { bound } else { x };
    if x < -bound { -bound } else { x }
}
