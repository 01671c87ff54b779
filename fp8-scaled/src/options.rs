//! Settings of scaled arithmetic on a thread.

use super::error::Result;
use fp8_core::scaled::{Pow2Round, Pow2Rounding, Scale, ScaleCheck};
use fp8_core::setters;
use fp8_core::{Format, philox4x32_10};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The precision in which matrix products and convolutions multiply.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fp8_scaled::*;
/// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
/// let _scope = scaled_scope(ScaledOptions::default().with_matmul(MatmulPrecision::FP8));
/// assert_eq!(x.matmul(&x)?.flatten_all()?.to_vec1()?, [-11.0, -12.0, 9.0, -8.0]); // exact in E4M3
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatmulPrecision {
    /// In the dtype of the data, with f32 sums. FP8 operands are multiplied in FP8.
    #[default]
    Data,
    /// Both operands are cast to FP8 first, without rescaling, and so is the cotangent of the result.
    Fp8 {
        /// Format of the operands.
        forward: Format,
        /// Format of the cotangent.
        backward: Format,
    },
}

impl MatmulPrecision {
    /// E4M3 forward, E5M2 backward.
    pub const FP8: Self = Self::Fp8 {
        forward: Format::E4M3,
        backward: Format::E5M2,
    };
}

/// Settings of scaled arithmetic, in force on a thread while a [`ScaledScope`] lives. A backward pass computes each derivative
/// under the settings under which the operation ran.
///
/// ```
/// use fp8_scaled::{MatmulPrecision, ScaledOptions, scaled_scope};
/// let options = ScaledOptions::default().with_matmul(MatmulPrecision::FP8);
/// let counters = options.counters.clone();
/// {
///     let _scope = scaled_scope(options);
///     // Forward passes go here.
/// }
/// assert_eq!(counters.fp8_matmuls(), 0);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ScaledOptions {
    /// How the factors of sums become powers of two. Stochastic rounding draws its random numbers by [`ScaledOptions::seed`].
    pub scale_rounding: Pow2Rounding,
    /// Which numbers are accepted as scales.
    pub check: ScaleCheck,
    /// The precision of products.
    pub matmul: MatmulPrecision,
    /// Seed of stochastic scale rounding. Each [`scaled_scope`] draws the numbers of its seed from the first one on, so scopes of the same seed
    /// round alike. With a scope for each step, give each another seed, such as the number of the step (`with_seed(step)`): otherwise all
    /// steps round the same way, which is a bias. A resumed run then repeats the numbers of its steps, too.
    pub seed: u64,
    /// Whether operations record a graph, without which no backward pass is possible. Default: true.
    pub gradients: bool,
    /// Counts of products and casts under these settings; clones share them.
    pub counters: ScaledCounters,
}

impl Default for ScaledOptions {
    fn default() -> Self {
        Self {
            scale_rounding: Pow2Rounding::default(),
            check: ScaleCheck::default(),
            matmul: MatmulPrecision::default(),
            seed: 0,
            gradients: true,
            counters: ScaledCounters::default(),
        }
    }
}

setters! { ScaledOptions:
    with_scale_rounding(scale_rounding: Pow2Rounding);
    with_check(check: ScaleCheck);
    with_matmul(matmul: MatmulPrecision);
    with_seed(seed: u64);
    with_gradients(gradients: bool);
}

/// Counts of products and casts, forward and backward.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fp8_scaled::*;
/// let options = ScaledOptions::default().with_matmul(MatmulPrecision::FP8);
/// let counters = options.counters.clone();
/// let _scope = scaled_scope(options);
/// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
/// x.matmul(&x)?;
/// assert_eq!((counters.fp8_matmuls(), counters.other_matmuls()), (1, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ScaledCounters(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    fp8: AtomicU64,
    other: AtomicU64,
    casts: AtomicU64,
}

impl ScaledCounters {
    /// Matrix products and convolutions computed by an FP8 GEMM.
    pub fn fp8_matmuls(&self) -> u64 {
        self.0.fp8.load(Ordering::Relaxed)
    }

    /// Tensors cast to FP8 for products; one cast may serve several.
    pub fn fp8_casts(&self) -> u64 {
        self.0.casts.load(Ordering::Relaxed)
    }

    /// Matrix products and convolutions computed in another precision.
    pub fn other_matmuls(&self) -> u64 {
        self.0.other.load(Ordering::Relaxed)
    }
}

/// The settings of one scope, and how many random numbers it has drawn.
#[derive(Debug, Default)]
pub(super) struct Options {
    pub(super) settings: ScaledOptions,
    draws: AtomicU64,
}

/// The options of a thread.
#[derive(Default)]
struct OfThread {
    /// Outside all scopes.
    outside: Arc<Options>,
    /// Those of the scopes that live, the innermost last.
    scopes: Vec<Arc<Options>>,
}

thread_local! {
    static OF_THREAD: RefCell<OfThread> = RefCell::default();
}

impl Options {
    pub(super) fn current() -> Arc<Self> {
        OF_THREAD.with_borrow(|of_thread| {
            let innermost = of_thread.scopes.last();
            innermost.unwrap_or(&of_thread.outside).clone()
        })
    }

    /// Puts `options` in force until the guard is dropped.
    pub(super) fn enter(options: Arc<Self>) -> ScaledScope {
        OF_THREAD.with_borrow_mut(|of_thread| of_thread.scopes.push(options.clone()));
        ScaledScope {
            options,
            not_send: PhantomData,
        }
    }

    /// The rounding of the next factor.
    pub(super) fn round(&self) -> Pow2Round {
        let rounding = self.settings.scale_rounding;
        if rounding != Pow2Rounding::Stochastic {
            return rounding.of_word(0);
        }
        let draw = self.draws.fetch_add(1, Ordering::Relaxed);
        let seed = self.settings.seed;
        let [word, ..] = philox4x32_10(
            [draw as u32, (draw >> 32) as u32, 0, 0],
            [seed as u32, (seed >> 32) as u32],
        );
        rounding.of_word(word)
    }

    pub(super) fn check(&self, scale: f32) -> Result<Scale> {
        Ok(self.settings.check.check(scale)?)
    }

    pub(super) fn count_matmul(&self, fp8: bool) {
        let counts = &self.settings.counters.0;
        let count = if fp8 { &counts.fp8 } else { &counts.other };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_cast(&self) {
        (self.settings.counters.0.casts).fetch_add(1, Ordering::Relaxed);
    }
}

/// Keeps settings in force on its thread until it is dropped. Scopes nest; of those that live, the one that was opened last is in force.
///
/// ```
/// # use fp8_scaled::*;
/// let scope = scaled_scope(ScaledOptions::default().with_gradients(false));
/// drop(scope); // restores the settings from before
/// ```
#[derive(Debug)]
#[must_use = "the settings are in force while the scope lives"]
pub struct ScaledScope {
    options: Arc<Options>,
    not_send: PhantomData<*const ()>,
}

impl Drop for ScaledScope {
    fn drop(&mut self) {
        // Scopes that were opened within this one may live longer, as the fields of a struct do.
        OF_THREAD.with_borrow_mut(|of_thread| {
            let scopes = &mut of_thread.scopes;
            let own = (scopes.iter()).rposition(|options| Arc::ptr_eq(options, &self.options));
            own.map(|own| scopes.remove(own));
        });
    }
}

/// Puts `options` in force on this thread until the scope is dropped.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_scaled::{Pow2Rounding, Scaled, ScaledOptions, scaled_scope};
/// let of = |scale| Scaled::from_parts(&Tensor::new(1f32, &Device::Cpu)?, scale);
/// let (a, b) = (of(2.0)?, of(8.0)?);
/// assert_eq!(a.add(&b)?.scale().to_f32(), 8.0);
/// let scope = scaled_scope(ScaledOptions::default().with_scale_rounding(Pow2Rounding::Up));
/// assert_eq!(a.add(&b)?.scale().to_f32(), 16.0);
/// drop(scope);
/// assert_eq!(a.add(&b)?.scale().to_f32(), 8.0);
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
pub fn scaled_scope(options: ScaledOptions) -> ScaledScope {
    Options::enter(Arc::new(Options {
        settings: options,
        draws: AtomicU64::new(0),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_that_end_in_any_order_leave_nothing() {
        let seed = || Options::current().settings.seed;
        let scope = |seed| scaled_scope(ScaledOptions::default().with_seed(seed));
        let outside = seed();
        let (first, second, third) = (scope(11), scope(12), scope(13));
        drop(first);
        assert_eq!(seed(), 13);
        drop(third);
        assert_eq!(seed(), 12);
        let fourth = scope(14);
        drop(second);
        assert_eq!(seed(), 14);
        drop(fourth);
        assert_eq!(seed(), outside);
    }
}
