//! Times a layer in FP8 and in high precision, which take turns.

use super::{Computation, LayerCase, LayerTiming};
use crate::autocast::{Autocast, Fp8State, fp8_autocast, is_guard_open};
use crate::config::Recipe;
use crate::error::{Error, Result};
use crate::module::Fp8Layer;
use crate::nn::{InputScaling, Linear, StaticWeight};
use candle_core::{Device, Tensor, Var};
use fp8_candle::StateTable;
use fp8_candle::wide::{backward, node};
use fp8_files::scheme::LayerScheme;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls before the first timed one: delayed scales come from earlier steps, and codes of a weight that stays the same are packed
/// after several calls.
const WARM_UP: usize = 6;
/// The warm-up of slow layers ends earlier, but not before this many calls: the first one only fills caches.
const LEAST_WARM_UP: usize = 2;
/// A call shorter than this is repeated until a sample is about as long.
const SAMPLE: Duration = Duration::from_millis(5);
/// Thread pools spin for a while after their work; the other contestant must not share the processor with that.
const SETTLE: Duration = Duration::from_millis(3);
/// Of slow layers, and of all others.
const LEAST_ROUNDS: usize = 4;
const ROUNDS: usize = 10;
const MOST_ROUNDS: usize = 24;
/// The answer is clear once each of [`ROUNDS`] rounds has one winner by at least this factor.
const CLEAR: f64 = 1.2;
/// The amax history of `prepare_fp8` by default.
const HISTORY: usize = 1024;

/// Times `case` for about `budget`, longer only if a few calls take longer. Under an open guard, which must not take part, and on a
/// pool worker, where no guard may open, it uses a new thread. It avoids that otherwise, because threads do not share the
/// memory that they have freed, and fresh memory is slow.
pub(super) fn measure(case: &LayerCase, device: &Device, budget: Duration) -> Result<LayerTiming> {
    let race = || Race::new(case, device)?.run(budget);
    if !is_guard_open() && rayon::current_thread_index().is_none() {
        return race();
    }
    std::thread::scope(|scope| {
        let panicked =
            |_| Error::Candle(candle_core::Error::msg(format!("timing {case} panicked")));
        scope.spawn(race).join().map_err(panicked)?
    })
}

/// One call; the result is dropped before it returns.
type Call = Box<dyn FnMut() -> Result<()>>;

/// A layer in FP8 or in high precision.
struct Contestant {
    /// Not timed.
    before: Call,
    call: Call,
    calls_per_sample: usize,
}

impl Contestant {
    fn new(
        before: impl FnMut() -> Result<()> + 'static,
        call: impl FnMut() -> Result<()> + 'static,
    ) -> Self {
        Self {
            before: Box::new(before),
            call: Box::new(call),
            calls_per_sample: 1,
        }
    }

    /// Of layers that only compute results.
    fn forward(layer: Linear, x: &Tensor) -> Self {
        let x = x.clone();
        let call = move || {
            black_box(layer.try_forward(&x)?);
            Ok(())
        };
        Self::new(|| Ok(()), call)
    }

    /// Seconds of a call, the mean of `calls`.
    fn sample(&mut self, device: &Device, calls: usize) -> Result<f64> {
        let mut sum = Duration::ZERO;
        for _ in 0..calls {
            (self.before)()?;
            device.synchronize()?;
            let began = Instant::now();
            (self.call)()?;
            device.synchronize()?;
            sum += began.elapsed();
        }
        Ok(sum.as_secs_f64() / calls as f64)
    }

    fn warm_up(&mut self, device: &Device, budget: Duration) -> Result<()> {
        let began = Instant::now();
        let mut last = 0.;
        for call in 0..WARM_UP {
            if call >= LEAST_WARM_UP && began.elapsed() > budget / 4 {
                break;
            }
            last = self.sample(device, 1)?;
        }
        let calls = (SAMPLE.as_secs_f64() / last.max(1e-7)).ceil();
        self.calls_per_sample = (calls as usize).clamp(1, 1000);
        Ok(())
    }
}

struct Race {
    fp8: Contestant,
    high_precision: Contestant,
    device: Device,
}

impl Race {
    fn new(case: &LayerCase, device: &Device) -> Result<Self> {
        let mut values = Values {
            random: StdRng::seed_from_u64(0),
            case,
            device,
        };
        let x = values.matrix(case.tokens, case.in_features)?;
        let weight = values.matrix(case.out_features, case.in_features)?;
        let (fp8, high_precision) = match &case.computation {
            Computation::Training(recipe) => {
                let grad = values.matrix(case.tokens, case.out_features)?;
                let contestant = |recipe| training(&x, &weight, &grad, recipe);
                (contestant(Some(&**recipe))?, contestant(None)?)
            }
            Computation::Evaluation(recipe) => {
                let high_precision = Contestant::forward(Linear::new(weight.clone(), None), &x);
                let (layer, x) = (prepared(weight)?, x.clone());
                let autocast = Autocast::new((**recipe).clone()).training(false);
                let call = move || {
                    let guard = fp8_autocast(autocast.clone())?;
                    black_box(layer.try_forward(&x)?);
                    guard.close()?;
                    Ok(())
                };
                (Contestant::new(|| Ok(()), call), high_precision)
            }
            Computation::Served(scheme) => {
                let served = static_weight(&weight, scheme)?;
                let decoded = served.weight().dequantize(case.dtype)?;
                (
                    Contestant::forward(Linear::from_static(served, None, "layer"), &x),
                    Contestant::forward(Linear::new(decoded, None), &x),
                )
            }
        };
        Ok(Self {
            fp8,
            high_precision,
            device: device.clone(),
        })
    }

    fn run(&mut self, budget: Duration) -> Result<LayerTiming> {
        let began = Instant::now();
        self.fp8.warm_up(&self.device, budget)?;
        self.high_precision.warm_up(&self.device, budget)?;
        let mut rounds = vec![];
        let goes_on = |rounds: &[(f64, f64)]| {
            let (count, over) = (rounds.len(), began.elapsed() >= budget);
            let clear = count >= ROUNDS && is_clear(rounds);
            count < LEAST_ROUNDS || (count < MOST_ROUNDS && !over && !clear)
        };
        while goes_on(&rounds) {
            let sample = |contestant: &mut Contestant| {
                std::thread::sleep(SETTLE);
                contestant.sample(&self.device, contestant.calls_per_sample)
            };
            // Each comes first in every other round: what one leaves behind, in caches and in memory, does not favour the other.
            rounds.push(match rounds.len() % 2 {
                0 => {
                    let fp8 = sample(&mut self.fp8)?;
                    (fp8, sample(&mut self.high_precision)?)
                }
                _ => {
                    let high_precision = sample(&mut self.high_precision)?;
                    (sample(&mut self.fp8)?, high_precision)
                }
            });
        }
        Ok(timing(&rounds))
    }
}

/// Whether more rounds would change nothing.
fn is_clear(rounds: &[(f64, f64)]) -> bool {
    let mut ratios = rounds.iter().map(|(fp8, high)| high / fp8);
    ratios.clone().all(|ratio| ratio > CLEAR) || ratios.all(|ratio| ratio * CLEAR < 1.)
}

/// The decision after rounds of (FP8, high precision), in seconds. FP8 also has to win three of four rounds, and to be faster where
/// each is at its best: other programs on the machine make the rest slower, by chance.
fn timing(rounds: &[(f64, f64)]) -> LayerTiming {
    let times = |of: fn(&(f64, f64)) -> f64| rounds.iter().map(of);
    let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    let timing = |summary: fn(Vec<f64>) -> f64| {
        let fp8 = summary(times(|round| round.0).collect());
        let high_precision = summary(times(|round| round.1).collect());
        LayerTiming::new(duration(fp8), duration(high_precision))
    };
    let (mut medians, best) = (timing(median), timing(least));
    let won = rounds.iter().filter(|(fp8, high)| fp8 < high).count();
    medians.fp8_pays &= best.fp8_pays && 4 * won >= 3 * rounds.len();
    medians
}

fn least(values: Vec<f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

/// The middle value, or the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len => (values[(len - 1) / 2] + values[len / 2]) / 2.,
    }
}

/// Matrices of the case's dtype. Their numbers come from a generator of their own: a device's is the program's.
struct Values<'a> {
    random: StdRng,
    case: &'a LayerCase,
    device: &'a Device,
}

impl Values<'_> {
    fn matrix(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        let values = (0..rows * cols).map(|_| self.random.random_range(-1f32..1.));
        let values = Tensor::from_vec(values.collect(), (rows, cols), &Device::Cpu)?;
        Ok(values.to_dtype(self.case.dtype)?.to_device(self.device)?)
    }
}

/// A layer with FP8 state, as `prepare_fp8` makes it.
fn prepared(weight: Tensor) -> Result<Linear> {
    let table = StateTable::new(weight.device())?;
    let layer = Linear::new(weight, None).with_path("layer");
    let state = Fp8State::new("layer".into(), layer.roles(), HISTORY, &table)?;
    layer.set_fp8_state(Some(Arc::new(state)));
    Ok(layer)
}

/// One step after the other, with a changed weight in each: under a recipe, or in high precision.
fn training(
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    recipe: Option<&Recipe>,
) -> Result<Contestant> {
    let (x, var) = (Var::from_tensor(x)?, Var::from_tensor(weight)?);
    let layer = match recipe {
        Some(_) => prepared(var.as_tensor().clone())?,
        None => Linear::new(var.as_tensor().clone(), None),
    };
    let mut next = [(weight * 0.99)?, weight.clone()].into_iter().cycle();
    let before = move || {
        let next = next.next().map(|next| var.set(&next));
        Ok(next.transpose().map(|_| ())?)
    };
    let (recipe, grad) = (recipe.cloned(), grad.clone());
    let call = move || {
        let guard = recipe.clone().map(fp8_autocast).transpose()?;
        let y = layer.try_forward(&x)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        // The rest of a model: nothing reads the result, so its time is that of the layer alone.
        let (end, own) = (
            Tensor::zeros((), grad.dtype(), grad.device())?,
            grad.clone(),
        );
        let end = node("gradient-from", &y, &end, move |_| Ok(own.clone()))?;
        black_box(backward(&end)?);
        Ok(())
    };
    Ok(Contestant::new(before, call))
}

/// The weight as a file of this scheme holds it.
fn static_weight(weight: &Tensor, scheme: &LayerScheme) -> Result<StaticWeight> {
    let codes = scheme.quantize(
        weight,
        None,
        scheme.input.has_power_of_two_scales(),
        "layer",
    )?;
    let input: Result<InputScaling> = scheme.input.with_scale(|()| {
        let dequant_scale = 1. / fp8_core::Format::E4M3.max();
        Ok(Tensor::new(&[dequant_scale], weight.device())?)
    });
    Ok(StaticWeight::new(&codes, input?, "layer")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_has_to_win_clearly_and_most_of_the_time() {
        let pays = |rounds: &[(f64, f64)]| timing(rounds).fp8_pays;
        assert!(pays(&[(1., 1.1), (1., 1.05), (1., 1.2), (1.1, 1.05)]));
        // Faster in the median, but by less than what changes from run to run.
        assert!(!pays(&[(1., 1.02); 8]));
        // As fast at its best as FP8 is.
        assert!(!pays(&[
            (1., 1.),
            (1., 1.5),
            (1., 1.5),
            (1., 1.5),
            (1., 1.5)
        ]));
        // Two rounds of four won.
        assert!(!pays(&[(1., 1.5), (1., 1.5), (1., 0.98), (1., 0.98)]));
        assert!(!pays(&[(1., 0.5); 4]));
    }

    #[test]
    fn times_are_medians() {
        let timing = timing(&[(1., 4.), (9., 5.), (2., 6.), (3., 99.)]);
        assert_eq!(timing.fp8, Duration::from_millis(2500));
        assert_eq!(timing.high_precision, Duration::from_millis(5500));
    }

    #[test]
    fn clear_differences_end_the_race() {
        assert!(is_clear(&[(1., 1.3); 4]));
        assert!(is_clear(&[(1.3, 1.); 4]));
        assert!(!is_clear(&[(1., 1.3), (1., 1.1), (1., 1.3), (1., 1.3)]));
    }
}
