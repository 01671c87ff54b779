//! The autocast guard: what is high precision, what nests, what is updated and when.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use fp8::core::{AmaxCompute, Format, Granularity, ScaleRounding};
use fp8::recipes::config::{
    CastConfig, DelayedFormat, DelayedScaling, Fp8LinearConfig, InitialScale, Recipe,
};
use fp8::recipes::nn::Linear;
use fp8::recipes::{
    Autocast, AutocastGuard, AutocastHandle, ReductionGroup, Role, SingleProcess, end_step,
    fp8_autocast, is_fp8_enabled,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};

#[path = "common/recipes.rs"]
mod common;
use common::{
    Layer, Slot, assert_close, assert_differ, assert_same, assert_text, bits, delayed, device,
    flat, of, skipped_on_cuda, slot, slots, tensor, var,
};

fn recipe(name: &str) -> Recipe {
    name.parse().unwrap()
}

fn open(autocast: impl Into<Autocast>) -> AutocastGuard {
    fp8_autocast(autocast).unwrap()
}

/// Opens guards one inside the other; they close in the reverse order.
struct Nest(Vec<AutocastGuard>);

impl Nest {
    fn open(guards: &[Autocast]) -> Self {
        Self(guards.iter().cloned().map(open).collect())
    }
}

impl Drop for Nest {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

fn backward(y: &Tensor, grad_output: &Tensor) -> GradStore {
    (y * grad_output)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap()
}

/// Forward and backward inside `guards`: y, grad_x, grad_weight, grad_bias.
fn run(
    layer: &Layer,
    module: &dyn Module,
    x: &Var,
    go: &Tensor,
    guards: &[Autocast],
) -> [Tensor; 4] {
    let _nest = Nest::open(guards);
    let y = module.forward(x).unwrap();
    let grads = backward(&y, go);
    let grad = |var: &Var| grads.get(var).unwrap().clone();
    [y, grad(x), grad(&layer.weight), grad(&layer.bias)]
}

const TENSORS: [&str; 4] = ["y", "grad_x", "grad_weight", "grad_bias"];

#[track_caller]
fn assert_all_same(case: &str, got: &[Tensor; 4], expected: &[Tensor; 4]) {
    for (name, (got, expected)) in TENSORS.iter().zip(got.iter().zip(expected)) {
        assert_same(&format!("{case}, {name}"), got, expected);
    }
}

/// A training step of one layer: forward in a guard, backward after it closed.
fn train(layer: &Layer, recipe: impl Into<Autocast>, x: &Tensor, go: &Tensor) -> Tensor {
    let guard = open(recipe);
    let y = layer.linear.forward(x).unwrap();
    guard.close().unwrap();
    backward(&y, go);
    y
}

// ---- high precision --------------------------------------------------------------------------

#[test]
fn without_fp8_the_layer_is_candle_nns_to_the_bit() {
    let (n, k) = (7, 9);
    let layer = Layer::new("fc", 1, n, k);
    let mut prepared = Layer {
        linear: layer.linear.clone(),
        ..Layer::new("fc", 1, n, k)
    };
    prepared.weight = layer.weight.clone();
    prepared.bias = layer.bias.clone();
    common::prepare(&mut prepared.linear);

    let disabled = Autocast::disabled();
    let fp8 = || Autocast::new(delayed(4));
    let calibrating = fp8().calibrating(true);
    let plain_contexts: Vec<(&str, Vec<Autocast>)> = vec![
        ("no guard", vec![]),
        ("disabled", vec![disabled.clone()]),
        ("disabled inside delayed", vec![fp8(), disabled.clone()]),
        (
            "disabled inside rowwise",
            vec![recipe("rowwise").into(), disabled.clone()],
        ),
        ("calibrating", vec![calibrating.clone()]),
        (
            "calibrating inside delayed",
            vec![fp8(), calibrating.clone()],
        ),
        (
            "disabled inside calibrating",
            vec![calibrating.clone(), disabled.clone()],
        ),
        (
            "calibrating without enabled",
            vec![calibrating.clone().enabled(false)],
        ),
    ];
    let all_recipes = common::recipes();
    let fp8_contexts: Vec<_> = all_recipes
        .iter()
        .map(|(name, r)| (*name, vec![Autocast::new(r.clone())]))
        .collect();

    for dtype in [DType::F32, DType::BF16] {
        for dims in [vec![5, k], vec![2, 3, k], vec![2, 1, 3, k]] {
            let x = Var::from_tensor(&tensor(3, &dims).to_dtype(dtype).unwrap()).unwrap();
            let mut out = dims.clone();
            *out.last_mut().unwrap() = n;
            let go = tensor(4, &out).to_dtype(dtype).unwrap();
            let stock = candle_nn::Linear::new(
                layer.weight.to_dtype(dtype).unwrap(),
                Some(layer.bias.to_dtype(dtype).unwrap()),
            );
            let expected = run(&layer, &stock, &x, &go, &[]);
            let case = |what: &str| format!("{what}, {dtype:?} {dims:?}");
            // The second round has calibrated and trained behind it.
            for round in ["fresh", "used"] {
                for (name, guards) in &plain_contexts {
                    let got = run(&layer, &prepared.linear, &x, &go, guards);
                    assert_all_same(
                        &case(&format!("prepared ({round}), {name}")),
                        &got,
                        &expected,
                    );
                }
                for (name, guards) in plain_contexts.iter().chain(&fp8_contexts) {
                    let got = run(&layer, &layer.linear, &x, &go, guards);
                    assert_all_same(&case(&format!("not prepared, {name}")), &got, &expected);
                }
                // The same comparison does see FP8.
                for (name, guards) in &fp8_contexts {
                    let got = run(&layer, &prepared.linear, &x, &go, guards);
                    assert_differ(&case(name), &got[0], &expected[0]);
                    assert_differ(&case(name), &got[1], &expected[1]);
                }
            }
        }
    }
    assert!(
        prepared
            .linear
            .fp8_state()
            .unwrap()
            .slot(Role::Input)
            .unwrap()
            .non_finite_count()
            .unwrap()
            == 0
    );
}

#[test]
fn calibration_alone_changes_no_later_high_precision_result() {
    let mut layer = Layer::new("fc", 10, 4, 6);
    let x = var(11, &[3, 6]);
    let go = tensor(12, &[3, 4]);
    let before = run(&layer, &layer.linear, &x, &go, &[]);
    common::prepare(&mut layer.linear);
    let guard = open(Autocast::new(recipe("tensorwise")).calibrating(true));
    layer.linear.forward(&x).unwrap();
    guard.close().unwrap();
    assert!(layer.linear.fp8_state().unwrap().calibration().is_some());
    for guards in [vec![], vec![Autocast::disabled()]] {
        let after = run(&layer, &layer.linear, &x, &go, &guards);
        assert_all_same(&format!("{} guards", guards.len()), &after, &before);
    }
}

// ---- nesting ---------------------------------------------------------------------------------

#[test]
fn an_inner_guard_overrides_the_outer_one_fully() {
    let layer = Layer::prepared("fc", 20, 8, 16);
    let x = tensor(21, &[5, 16]);
    let alone = |name: &str| {
        let _guard = open(recipe(name));
        layer.linear.forward(&x).unwrap()
    };
    let names = ["tensorwise", "rowwise"];
    let [tensorwise, rowwise] = names.map(alone);
    assert_differ("the recipes", &tensorwise, &rowwise);

    let outer = open(recipe("tensorwise"));
    {
        let _inner = open(recipe("rowwise"));
        assert_same(
            "inner rowwise",
            &layer.linear.forward(&x).unwrap(),
            &rowwise,
        );
        {
            let _disabled = open(Autocast::disabled());
            assert!(!is_fp8_enabled(), "disabled innermost");
            let plain = layer.stock().forward(&x).unwrap();
            assert_same(
                "disabled innermost",
                &layer.linear.forward(&x).unwrap(),
                &plain,
            );
        }
        assert!(is_fp8_enabled(), "after the disabled guard");
        assert_same(
            "rowwise again",
            &layer.linear.forward(&x).unwrap(),
            &rowwise,
        );
    }
    assert_same(
        "outer again",
        &layer.linear.forward(&x).unwrap(),
        &tensorwise,
    );
    drop(outer);
    assert!(!is_fp8_enabled(), "after the last guard");
}

/// An inner guard's `training` counts, not the outer one's.
#[test]
fn training_of_the_innermost_guard_decides_what_is_recorded() {
    let x = tensor(31, &[2, 4]);
    for (outer, inner, records) in [
        (true, false, false),
        (false, true, true),
        (true, true, true),
        (false, false, false),
    ] {
        let layer = Layer::prepared("fc", 30, 3, 4);
        {
            let _outer = open(Autocast::new(delayed(4)).training(outer));
            let _inner = open(Autocast::new(delayed(4)).training(inner));
            layer.linear.forward(&x).unwrap();
        }
        let recorded = layer.slot("input").history[0] > 0.;
        assert_eq!(
            recorded, records,
            "outer training {outer}, inner training {inner}"
        );
    }
}

#[test]
fn scales_change_only_when_the_outermost_enabled_guard_closes() {
    let x = tensor(41, &[2, 4]);
    let fp8 = || Autocast::new(delayed(4));
    let off = Autocast::disabled;
    // Guards from the outside in; the layer runs in the innermost; `at` is the one whose close updates.
    let cases: [(&str, Vec<Autocast>, usize); 6] = [
        ("one guard", vec![fp8()], 0),
        ("two enabled", vec![fp8(), fp8()], 0),
        ("three enabled", vec![fp8(), fp8(), fp8()], 0),
        ("enabled inside disabled", vec![off(), fp8()], 1),
        ("enabled, disabled, enabled", vec![fp8(), off(), fp8()], 0),
        ("disabled, enabled, enabled", vec![off(), fp8(), fp8()], 1),
    ];
    for (case, guards, at) in cases {
        let layer = Layer::prepared("fc", 40, 3, 4);
        let mut nest: Vec<_> = guards.into_iter().map(open).collect();
        layer.linear.forward(&x).unwrap();
        while let Some(guard) = nest.pop() {
            let [input, weight, _] = slots(&layer.linear);
            let untouched = input.quant_scale == 1. && weight.quant_scale == 1.;
            assert!(
                untouched || nest.len() < at,
                "{case}: updated before guard {at} closed"
            );
            guard.close().unwrap();
            if nest.len() == at {
                let [input, weight, _] = slots(&layer.linear);
                assert_eq!(input.history[0], amax(&x), "{case}: input");
                assert_eq!(weight.history[0], amax(&layer.weight), "{case}: weight");
            }
        }
        assert_eq!(layer.slot("input").history[1], 0., "{case}: updated twice");
    }
}

fn amax(x: &Tensor) -> f32 {
    flat(x).into_iter().fold(0., |max, x| max.max(x.abs()))
}

#[test]
fn the_recipe_of_an_inner_guard_makes_the_update_of_its_layers() {
    let (a, b) = (
        Layer::prepared("a", 50, 2, 2),
        Layer::prepared("b", 51, 2, 2),
    );
    let x = of(&[2., 0.], &[1, 2]);
    {
        let _outer = open(delayed(4));
        a.linear.forward(&x).unwrap();
        let _inner = open(delayed(2).with_margin(1));
        b.linear.forward(&x).unwrap();
    }
    let (a, b) = (a.slot("input"), b.slot("input"));
    assert_eq!(
        (a.quant_scale, a.history),
        (224., vec![2., 0., 0., 0.]),
        "outer recipe"
    );
    assert_eq!(
        (b.quant_scale, b.history),
        (112., vec![2., 0.]),
        "inner recipe"
    );
}

// ---- unwinding and odd orders ----------------------------------------------------------------

#[test]
fn a_panic_restores_what_was_there_and_updates_nothing() {
    for initial in [InitialScale::One, InitialScale::FirstBatch] {
        let recipe = || delayed(4).with_initial(initial);
        let (panicked, control) = (
            Layer::prepared("fc", 60, 3, 4),
            Layer::prepared("fc", 60, 3, 4),
        );
        let x = tensor(61, &[2, 4]);
        let go = tensor(62, &[2, 3]);
        let warm = initial == InitialScale::One;
        if warm {
            for layer in [&panicked, &control] {
                train(layer, recipe(), &(&x * 0.5).unwrap(), &go);
            }
        }
        end_step().unwrap();
        let before = slots(&panicked.linear);
        let histories = |slots: &[Slot; 3]| slots.each_ref().map(|slot| slot.history.clone());
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _outer = open(recipe());
            let _inner = open(Autocast::disabled());
            let _innermost = open(recipe());
            let y = panicked.linear.forward(&(&x * 2.).unwrap()).unwrap();
            backward(&y, &go);
            panic!("a step that fails");
        }));
        assert!(outcome.is_err());
        assert!(!is_fp8_enabled(), "{initial:?}: the guards are gone");
        let after = slots(&panicked.linear);
        assert_eq!(
            histories(&after),
            histories(&before),
            "{initial:?}: histories"
        );
        if warm {
            assert_eq!(after, before, "{initial:?}: scales");
            // The next step is as if the panic had not been, its amaxes included.
            for layer in [&panicked, &control] {
                train(layer, recipe(), &x, &go);
            }
            end_step().unwrap();
            assert_eq!(
                slots(&panicked.linear),
                slots(&control.linear),
                "{initial:?}: next step"
            );
        }
    }
}

#[test]
fn a_panic_in_the_first_step_does_not_keep_a_frozen_weight_at_scale_one() {
    let layer = Layer::prepared("fc", 63, 3, 4);
    let x = tensor(64, &[2, 4]);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = open(delayed(4));
        layer.linear.forward(&x).unwrap();
        panic!("the first step");
    }));
    assert!(outcome.is_err());
    for _ in 0..2 {
        let _guard = open(delayed(4));
        layer.linear.forward(&x).unwrap();
    }
    let expected = 448. / amax(&layer.weight);
    assert_eq!(layer.slot("weight").quant_scale, expected, "weight");
}

#[test]
fn a_panic_drops_what_a_calibration_recorded() {
    let layer = Layer::prepared("fc", 65, 3, 4);
    let calibrate = |x: &Tensor| {
        let _guard = open(Autocast::default().calibrating(true));
        layer.linear.forward(x).unwrap();
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = open(Autocast::default().calibrating(true));
        layer.linear.forward(&of(&[100.; 4], &[1, 4])).unwrap();
        panic!("while calibrating");
    }));
    assert!(outcome.is_err());
    assert_eq!(
        layer.linear.fp8_state().unwrap().calibration(),
        None,
        "not calibrated"
    );
    calibrate(&of(&[7.; 4], &[1, 4]));
    assert_eq!(
        layer.slot("input").quant_scale,
        64.,
        "only the batch of 7 counts"
    );
}

#[test]
fn a_panic_inside_an_inner_guard_leaves_the_outer_one_open() {
    let layer = Layer::prepared("fc", 66, 3, 4);
    let outer = open(delayed(4));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _inner = open(Autocast::disabled());
        panic!("inside");
    }));
    assert!(outcome.is_err());
    assert!(is_fp8_enabled(), "the outer guard is back");
    let x = tensor(67, &[2, 4]);
    layer.linear.forward(&x).unwrap();
    drop(outer);
    assert_eq!(
        layer.slot("input").history[0],
        amax(&x),
        "the outer guard still updates"
    );
}

#[test]
fn guards_may_close_in_any_order() {
    let layer = Layer::prepared("fc", 70, 3, 4);
    let (x, larger) = (of(&[2.; 4], &[1, 4]), of(&[8.; 4], &[1, 4]));
    let outer = open(delayed(4));
    let middle = open(Autocast::disabled());
    let inner = open(delayed(4));
    layer.linear.forward(&x).unwrap();
    drop(middle);
    assert!(is_fp8_enabled(), "the inner guard is still open");
    layer.linear.forward(&x).unwrap();
    drop(outer);
    assert!(is_fp8_enabled(), "the inner guard outlives the outer one");
    assert_eq!(
        layer.slot("input").history,
        [2., 0., 0., 0.],
        "updated at the outer guard's close"
    );
    let error = layer.linear.forward(&larger).unwrap_err();
    assert_text("its step has ended", error, &["is closed"]);
    drop(inner);
    assert!(!is_fp8_enabled(), "all closed");
    // The thread is as new: the next guard is an outermost one again.
    {
        let _guard = open(delayed(4));
        layer.linear.forward(&larger).unwrap();
    }
    assert_eq!(
        layer.slot("input").history,
        [8., 2., 0., 0.],
        "the next step"
    );

    let disabled = open(Autocast::disabled());
    let enabled = open(recipe("tensorwise"));
    drop(disabled);
    assert!(
        is_fp8_enabled(),
        "dropping the outer, disabled guard leaves the inner one"
    );
    drop(enabled);
    assert!(!is_fp8_enabled());
}

// ---- threads ---------------------------------------------------------------------------------

/// `IS_SEND` and `IS_SYNC` are the inherent constants where the bound holds, the trait's otherwise.
struct Probe<T: ?Sized>(std::marker::PhantomData<T>);
trait Fallback {
    const IS_SEND: bool = false;
    const IS_SYNC: bool = false;
}
impl<T: ?Sized> Fallback for Probe<T> {}
impl<T: ?Sized + Send> Probe<T> {
    const IS_SEND: bool = true;
}
impl<T: ?Sized + Sync> Probe<T> {
    const IS_SYNC: bool = true;
}

#[test]
fn the_guard_stays_on_its_thread_and_the_rest_may_travel() {
    let guard = (
        <Probe<AutocastGuard>>::IS_SEND,
        <Probe<AutocastGuard>>::IS_SYNC,
    );
    assert_eq!(guard, (false, false), "AutocastGuard");
    let handle = (
        <Probe<AutocastHandle>>::IS_SEND,
        <Probe<AutocastHandle>>::IS_SYNC,
    );
    assert_eq!(handle, (true, true), "AutocastHandle");
    let linear = (<Probe<Linear>>::IS_SEND, <Probe<Linear>>::IS_SYNC);
    assert_eq!(linear, (true, true), "Linear");
    let autocast = (<Probe<Autocast>>::IS_SEND, <Probe<Autocast>>::IS_SYNC);
    assert_eq!(autocast, (true, true), "Autocast");
}

#[test]
fn two_threads_train_with_two_recipes_at_once() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    let x = tensor(81, &[6, 8]);
    let go = tensor(82, &[6, 4]);
    let names = ["tensorwise", "rowwise", "delayed"];
    // Three steps; gives the outputs and the last state.
    let steps = |name: &str, wait: &dyn Fn()| {
        let layer = Layer::prepared("fc", 80, 4, 8);
        let ys: Vec<_> = (0..3)
            .map(|_| {
                let guard = open(recipe(name));
                wait();
                let y = layer.linear.forward(&x).unwrap();
                wait();
                guard.close().unwrap();
                backward(&y, &go);
                bits(&y)
            })
            .collect();
        end_step().unwrap();
        (ys, slots(&layer.linear))
    };
    let expected = names.map(|name| steps(name, &|| ()));
    assert_ne!(expected[0].0, expected[1].0, "the recipes differ");
    let barrier = Barrier::new(names.len() + 1);
    std::thread::scope(|scope| {
        let threads = names.map(|name| {
            let (steps, barrier) = (&steps, &barrier);
            scope.spawn(move || {
                steps(name, &|| {
                    barrier.wait();
                })
            })
        });
        // This thread has no guard while the others have theirs open.
        for _ in 0..6 {
            barrier.wait();
            assert!(!is_fp8_enabled(), "a guard of another thread");
        }
        for ((thread, name), expected) in threads.into_iter().zip(names).zip(&expected) {
            assert!(
                thread.join().unwrap() == *expected,
                "{name} beside the others"
            );
        }
    });
}

fn in_private_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2);
    pool.build().unwrap().install(work)
}

#[test]
fn a_handle_carries_the_context_into_other_pools() {
    let x = tensor(91, &[5, 8]);
    let go = tensor(92, &[5, 4]);
    for name in ["private pool", "candle's pool"] {
        let layer = Layer::prepared("fc", 90, 4, 8);
        let forward = |handle: Option<&AutocastHandle>| {
            let here = || (layer.linear.forward(&x).unwrap(), is_fp8_enabled());
            let work = || match handle {
                Some(handle) => handle.run(here).unwrap(),
                None => here(),
            };
            match name {
                "private pool" => in_private_pool(work),
                _ => Device::Cpu.with_context(work),
            }
        };
        let control = Layer::prepared("fc", 90, 4, 8);
        let expected = train(&control, delayed(4), &x, &go);
        end_step().unwrap();
        let plain = layer.stock().forward(&x).unwrap();

        let guard = open(delayed(4));
        let (y, enabled) = forward(None);
        assert!(!enabled, "{name}: a pool thread sees no guard of its own");
        assert_same(&format!("{name}, without a handle"), &y, &plain);
        let (y, enabled) = forward(Some(&guard.handle()));
        assert!(enabled, "{name}: the handle opens the context");
        assert_same(&format!("{name}, through a handle"), &y, &expected);
        let (again, _) = forward(Some(&AutocastHandle::current()));
        assert_same(
            &format!("{name}, through the current context"),
            &again,
            &expected,
        );
        assert_eq!(
            layer.slot("input").history[0],
            0.,
            "{name}: the handle's close updates nothing"
        );
        guard.close().unwrap();
        assert_eq!(
            layer.slot("input").history[0],
            amax(&x),
            "{name}: at the owner's close"
        );
        backward(&y, &go);
        end_step().unwrap();
        assert_eq!(
            slots(&layer.linear),
            slots(&control.linear),
            "{name}: state"
        );
        let (y, enabled) = forward(None);
        assert!(!enabled, "{name}: nothing stays open on the pool's thread");
        assert_same(&format!("{name}, afterwards"), &y, &plain);
    }
}

#[test]
fn many_threads_under_one_guard_merge_by_maximum() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    let layer = Layer::prepared("fc", 95, 4, 8);
    let guard = open(delayed(4));
    let handle = guard.handle();
    std::thread::scope(|scope| {
        for i in 1..=16 {
            let (handle, layer) = (&handle, &layer);
            scope.spawn(move || {
                let _guard = handle.open().unwrap();
                // Guards of its own, too: the owner stays the first one.
                let _inner = open(delayed(4));
                layer.linear.forward(&of(&[i as f32; 8], &[1, 8])).unwrap();
            });
        }
    });
    assert_eq!(layer.slot("input").history[0], 0., "before the close");
    drop(guard);
    assert_eq!(
        layer.slot("input").history,
        [16., 0., 0., 0.],
        "the largest of sixteen, once"
    );
    assert_eq!(layer.slot("weight").history[1], 0., "one update");
}

#[test]
fn a_handle_taken_without_a_guard_means_high_precision() {
    let layer = Layer::prepared("fc", 97, 4, 8);
    let x = tensor(98, &[5, 8]);
    let handle = AutocastHandle::current();
    let guard = open(delayed(4));
    let y = handle.run(|| layer.linear.forward(&x).unwrap()).unwrap();
    guard.close().unwrap();
    assert_same("no guard", &y, &layer.stock().forward(&x).unwrap());
}

// ---- delayed scaling: when -------------------------------------------------------------------

#[test]
fn forward_slots_update_at_close_and_gradients_at_the_next_use_or_end_of_step() {
    let x = of(&[2., -1.], &[1, 2]);
    let go = of(&[8., 4.], &[1, 2]);
    type Ending = (&'static str, fn(&Layer), bool);
    // Uses in a step of another model, or outside of training, leave the gradients to what may still come.
    fn used_in(layer: &Layer, autocast: impl Into<Autocast>) {
        let guard = open(autocast);
        layer.linear.forward(&of(&[0.; 2], &[1, 2])).unwrap();
        guard.abort();
    }
    let endings: [Ending; 6] = [
        ("end_step", |_| drop(end_step().unwrap()), true),
        (
            "use in the next guard",
            |layer| used_in(layer, delayed(4)),
            true,
        ),
        (
            "use in the next guard of another recipe",
            |layer| used_in(layer, recipe("rowwise")),
            true,
        ),
        (
            "a guard of another model",
            |_| used_in(&Layer::prepared("other", 9, 2, 2), delayed(4)),
            false,
        ),
        (
            "use in an evaluation guard",
            |layer| used_in(layer, Autocast::new(delayed(4)).training(false)),
            false,
        ),
        (
            "use in a disabled guard",
            |layer| used_in(layer, Autocast::disabled()),
            false,
        ),
    ];
    for (case, ending, updates) in endings {
        let layer = Layer::prepared("fc", 100, 2, 2);
        let guard = open(delayed(4));
        let y = layer.linear.forward(&x).unwrap();
        backward(&y, &go);
        assert_eq!(
            layer.slot("input").history[0],
            0.,
            "{case}: nothing while the guard is open"
        );
        guard.close().unwrap();
        let [input, weight, grad_output] = slots(&layer.linear);
        assert_eq!(input.quant_scale, 224., "{case}: input at close");
        assert_eq!(
            weight.quant_scale,
            448. / amax(&layer.weight),
            "{case}: weight at close"
        );
        assert_eq!(grad_output.quant_scale, 1., "{case}: grad_output waits");
        ending(&layer);
        let expected = if updates { 7168. } else { 1. };
        assert_eq!(
            layer.slot("grad_output").quant_scale,
            expected,
            "grad_output after {case}"
        );
        end_step().unwrap();
        let grad_output = layer.slot("grad_output");
        assert_eq!(grad_output.history, [8., 0., 0., 0.], "{case}: once in all");
        end_step().unwrap();
        assert_eq!(
            layer.slot("grad_output"),
            grad_output,
            "{case}: a second end_step"
        );
        assert_eq!(
            layer.slot("input").history,
            [2., 0., 0., 0.],
            "{case}: input stays"
        );
    }
}

#[test]
fn gradients_of_a_backward_after_the_close_count_too() {
    let layer = Layer::prepared("fc", 105, 2, 2);
    let x = of(&[2., -1.], &[1, 2]);
    for (step, amax) in [8f32, 32., 2.].into_iter().enumerate() {
        train(&layer, delayed(4), &x, &of(&[amax, 0.], &[1, 2]));
        let recorded = layer.slot("grad_output").history;
        assert_eq!(
            recorded[0],
            [0., 8., 32.][step],
            "step {step}: the last step's amax"
        );
    }
    end_step().unwrap();
    let expected = Slot {
        quant_scale: 1792.,
        history: vec![2., 32., 8., 0.],
        non_finite: 0,
    };
    assert_eq!(layer.slot("grad_output"), expected);
}

#[test]
fn evaluation_casts_with_the_frozen_scales_and_changes_nothing() {
    let layer = Layer::prepared("fc", 110, 4, 8);
    let (x, go) = (tensor(111, &[3, 8]), tensor(112, &[3, 4]));
    for _ in 0..2 {
        train(&layer, delayed(4), &x, &go);
    }
    end_step().unwrap();
    let before = slots(&layer.linear);
    let eval = |x: &Tensor| {
        let guard = open(Autocast::new(delayed(4)).training(false));
        let y = layer.linear.forward(x).unwrap();
        guard.close().unwrap();
        y
    };
    let big = (&x * 100.).unwrap();
    let y = eval(&x);
    assert_differ("evaluation is FP8", &y, &layer.stock().forward(&x).unwrap());
    // Under the frozen scale a hundred times larger input saturates.
    let largest = 448. / before[0].quant_scale;
    let clamped = layer
        .stock()
        .forward(&big.clamp(-largest, largest).unwrap())
        .unwrap();
    assert_close("saturated", &eval(&big), &clamped, 0.1);
    backward(&eval(&x), &go);
    end_step().unwrap();
    assert_eq!(slots(&layer.linear), before, "no scale and no history");
    assert_same("evaluation again", &eval(&x), &y);
}

#[test]
fn evaluation_between_the_steps_leaves_no_trace() {
    let x = tensor(116, &[3, 8]);
    let go = tensor(117, &[3, 4]);
    let steps = |evaluate: bool| {
        let layer = Layer::prepared("fc", 115, 4, 8);
        let mut ys = vec![];
        for step in 0..4 {
            let x = (&x * f64::from(1 + step)).unwrap();
            ys.push(bits(&train(&layer, delayed(2), &x, &go)));
            if evaluate {
                let _guard = open(Autocast::new(delayed(2)).training(false));
                layer.linear.forward(&(&x * 3.).unwrap()).unwrap();
            }
            // Every other step leaves the weight as it is.
            if step % 2 == 1 {
                layer
                    .weight
                    .set(&(layer.weight.as_tensor() * 0.9).unwrap())
                    .unwrap();
            }
        }
        end_step().unwrap();
        (ys, slots(&layer.linear))
    };
    let (without, with) = (steps(false), steps(true));
    assert_eq!(with.1, without.1, "state");
    assert!(with.0 == without.0, "outputs of the training steps");
}

/// 0.3 is cast to 256 / 896 under the scale of the weight 0.5 before it, to 448 under its own.
#[test]
fn evaluation_takes_the_newest_scale_and_leaves_the_codes_of_the_step() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let layer = Layer::prepared("fc", 118, 1, 1);
    let one = of(&[1.], &[1, 1]);
    layer.bias.set(&of(&[0.], &[1])).unwrap();
    layer.weight.set(&of(&[0.5], &[1, 1])).unwrap();
    train(&layer, delayed(1), &one, &one);
    layer.weight.set(&of(&[0.3], &[1, 1])).unwrap();
    let evaluate = || {
        let _guard = open(Autocast::new(delayed(1)).training(false));
        layer.linear.forward(&one).unwrap()
    };
    for (case, y, expected) in [
        ("evaluation before the step", evaluate(), 256. / 896.),
        (
            "training",
            train(&layer, delayed(1), &one, &one),
            256. / 896.,
        ),
        ("evaluation", evaluate(), 0.3),
        (
            "training, unchanged weight",
            train(&layer, delayed(1), &one, &one),
            256. / 896.,
        ),
        ("evaluation again", evaluate(), 0.3),
    ] {
        let y = flat(&y)[0];
        assert!(
            (y - expected).abs() < 1e-6,
            "{case}: got {y}, expected {expected}"
        );
    }
}

#[test]
fn a_disabled_guard_updates_nothing() {
    let layer = Layer::prepared("fc", 120, 4, 8);
    let (x, go) = (tensor(121, &[3, 8]), tensor(122, &[3, 4]));
    train(&layer, delayed(4), &x, &go);
    end_step().unwrap();
    let before = slots(&layer.linear);
    for guards in [
        vec![Autocast::disabled()],
        vec![delayed(4).into(), Autocast::disabled()],
    ] {
        let nest = Nest::open(&guards);
        backward(&layer.linear.forward(&(&x * 2.).unwrap()).unwrap(), &go);
        drop(nest);
        end_step().unwrap();
        assert_eq!(slots(&layer.linear), before, "{} guards", guards.len());
    }
}

// ---- delayed scaling: the numbers ------------------------------------------------------------

/// One step: x, weight and output gradient have these amaxes.
const TRACE: [[f32; 3]; 6] = [
    [2., 0.5, 8.],
    [4., 0.25, 2.],
    [1., 0.125, 16.],
    [0.5, 1., 1.],
    [0.25, 0.0625, 1.],
    [0.125, 0.03125, 0.5],
];

/// The quant_scales after each step, worked out by hand from `max * 2^-margin / amax(history)`.
type Expected = [[f32; 3]; 6];

#[test]
fn the_trace_of_a_layer_equals_hand_computed_scales() {
    let cases: [(&str, DelayedScaling, Expected); 5] = [
        (
            "max over 3",
            delayed(3),
            [
                [224., 896., 7168.],
                [112., 896., 7168.],
                [112., 896., 3584.],
                [112., 448., 3584.],
                [448., 448., 3584.],
                [896., 448., 57344.],
            ],
        ),
        (
            "most recent",
            delayed(3).with_amax_compute(AmaxCompute::MostRecent),
            [
                [224., 896., 7168.],
                [112., 1792., 28672.],
                [448., 3584., 3584.],
                [896., 448., 57344.],
                [1792., 7168., 57344.],
                [3584., 14336., 114688.],
            ],
        ),
        (
            "margin 1, power of two, max over 2",
            delayed(2)
                .with_margin(1)
                .with_scale_rounding(ScaleRounding::PowerOfTwo),
            [
                [64., 256., 2048.],
                [32., 256., 2048.],
                [32., 512., 1024.],
                [128., 128., 1024.],
                [256., 128., 16384.],
                [512., 2048., 16384.],
            ],
        ),
        (
            "E4M3 both ways, first batch, max over 1",
            delayed(1)
                .with_format(DelayedFormat::E4m3)
                .with_initial(InitialScale::FirstBatch),
            [
                [224., 896., 56.],
                [112., 1792., 224.],
                [448., 3584., 28.],
                [896., 448., 448.],
                [1792., 7168., 448.],
                [3584., 14336., 896.],
            ],
        ),
        (
            "E5M2 both ways, the whole history",
            delayed(16).with_format(DelayedFormat::E5m2),
            [
                [28672., 114688., 7168.],
                [14336., 114688., 7168.],
                [14336., 114688., 3584.],
                [14336., 57344., 3584.],
                [14336., 57344., 3584.],
                [14336., 57344., 3584.],
            ],
        ),
    ];
    for (case, recipe, expected) in cases {
        let layer = Layer::prepared("fc", 130, 1, 2);
        for (step, [x, weight, go]) in TRACE.into_iter().enumerate() {
            layer
                .weight
                .set(&of(&[weight, -weight / 4.], &[1, 2]))
                .unwrap();
            train(
                &layer,
                recipe.clone(),
                &of(&[x / 2., -x], &[1, 2]),
                &of(&[-go], &[1, 1]),
            );
            end_step().unwrap();
            let slots = slots(&layer.linear);
            let scales = slots.each_ref().map(|slot| slot.quant_scale);
            assert_eq!(scales, expected[step], "{case}, step {step}: quant_scales");
            let len = recipe.amax_history_len;
            for (role, slot) in slots.iter().enumerate() {
                let mut history: Vec<f32> = TRACE[..=step]
                    .iter()
                    .rev()
                    .map(|amaxes| amaxes[role])
                    .collect();
                history.resize(len, 0.);
                assert_eq!(
                    slot.history, history,
                    "{case}, step {step}, role {role}: history"
                );
            }
        }
    }
}

/// 0.3 is 0.3125 in E4M3, but 448 after the scale 448 / 0.3; 1000 saturates at 448 under the scale 1.
#[test]
fn the_scale_of_a_step_comes_from_the_steps_before() {
    use InitialScale::{FirstBatch, One};
    let y = |initial, x: f32, steps: usize| {
        let layer = Layer::prepared("fc", 140, 1, 1);
        layer.weight.set(&of(&[0.5], &[1, 1])).unwrap();
        layer.bias.set(&of(&[0.], &[1])).unwrap();
        let recipe = || delayed(4).with_initial(initial);
        let x = of(&[x], &[1, 1]);
        let step = || flat(&train(&layer, recipe(), &x, &of(&[1.], &[1, 1])))[0];
        (0..steps).fold(f32::NAN, |_, _| step())
    };
    for (initial, x, steps, expected) in [
        (One, 0.3, 1, 0.15625),
        (One, 0.3, 2, 0.15),
        (FirstBatch, 0.3, 1, 0.15),
        (FirstBatch, 0.3, 2, 0.15),
        (One, 1000., 1, 224.),
        (One, 1000., 2, 500.),
        (FirstBatch, 1000., 1, 500.),
        // Below half of the smallest subnormal, 2^-9.
        (One, 1e-6, 1, 0.),
        (One, 1e-6, 2, 5e-7),
    ] {
        let got = y(initial, x, steps);
        let case = format!("{initial:?}, x = {x}, step {steps}");
        assert!(
            (got - expected).abs() <= 1e-6 * expected,
            "{case}: got {got}, expected {expected}"
        );
    }
}

#[test]
fn the_first_batch_is_the_first_that_makes_a_scale() {
    let recipe = || delayed(4).with_initial(InitialScale::FirstBatch);
    let (x, go) = (of(&[0.3], &[1, 1]), of(&[1.], &[1, 1]));
    for (case, nothing) in [("zeros", 0.), ("Inf", f32::INFINITY), ("NaN", f32::NAN)] {
        let layer = Layer::prepared("fc", 145, 1, 1);
        layer.weight.set(&of(&[0.5], &[1, 1])).unwrap();
        layer.bias.set(&of(&[0.], &[1])).unwrap();
        train(&layer, recipe(), &of(&[nothing], &[1, 1]), &go);
        assert_eq!(
            layer.slot("input").quant_scale,
            1.,
            "{case}: no scale from it"
        );
        let y = flat(&train(&layer, recipe(), &x, &go))[0];
        assert!(
            (y - 0.15).abs() < 1e-6,
            "after {case}: y = {y}, expected 0.15"
        );
        assert_eq!(
            layer.slot("input").history,
            [0.3, 0., 0., 0.],
            "after {case}"
        );
    }
}

#[test]
fn an_unused_layer_and_a_zero_amax_keep_history_and_scale() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let (used, idle) = (
        Layer::prepared("used", 150, 2, 2),
        Layer::prepared("idle", 151, 2, 2),
    );
    let (x, go) = (of(&[2., 1.], &[1, 2]), of(&[1., 1.], &[1, 2]));
    for layer in [&used, &idle] {
        train(layer, delayed(4), &x, &go);
    }
    end_step().unwrap();
    let before = slots(&idle.linear);
    train(&used, delayed(4), &x, &go);
    end_step().unwrap();
    assert_eq!(slots(&idle.linear), before, "not used");
    let zeros = of(&[0., 0.], &[1, 2]);
    train(&idle, delayed(4), &zeros, &zeros);
    end_step().unwrap();
    assert_eq!(
        slots(&idle.linear),
        before,
        "only zeros, and the weight did not change"
    );
    // An empty batch has no amax either.
    train(&idle, delayed(4), &tensor(1, &[0, 2]), &tensor(1, &[0, 2]));
    end_step().unwrap();
    assert_eq!(slots(&idle.linear), before, "an empty batch");
}

#[test]
fn a_layer_used_twice_and_micro_batches_merge_by_maximum() {
    let xs = [
        of(&[2., 1.], &[1, 2]),
        of(&[3., -1.], &[1, 2]),
        of(&[1., 1.], &[1, 2]),
    ];
    let gos = [
        of(&[1., 4.], &[1, 2]),
        of(&[8., 0.], &[1, 2]),
        of(&[2., 2.], &[1, 2]),
    ];
    for case in [
        "one graph",
        "micro-batches in one guard",
        "backward after the close",
    ] {
        let layer = Layer::prepared("fc", 160, 2, 2);
        let guard = open(delayed(4));
        let ys: Vec<_> = xs
            .iter()
            .map(|x| layer.linear.forward(x).unwrap())
            .collect();
        let losses = ys
            .iter()
            .zip(&gos)
            .map(|(y, go)| (y * go).unwrap().sum_all().unwrap());
        match case {
            "one graph" => {
                let loss = losses.reduce(|a, b| (a + b).unwrap()).unwrap();
                loss.backward().unwrap();
                guard.close().unwrap();
            }
            "micro-batches in one guard" => {
                losses.for_each(|loss| drop(loss.backward().unwrap()));
                guard.close().unwrap();
            }
            _ => {
                guard.close().unwrap();
                losses.for_each(|loss| drop(loss.backward().unwrap()));
            }
        }
        end_step().unwrap();
        let [input, weight, grad_output] = slots(&layer.linear);
        assert_eq!(input.history, [3., 0., 0., 0.], "{case}: input");
        assert_eq!(input.quant_scale, 448. / 3., "{case}: input");
        assert_eq!(
            weight.history,
            [amax(&layer.weight), 0., 0., 0.],
            "{case}: weight"
        );
        assert_eq!(grad_output.history, [8., 0., 0., 0.], "{case}: grad_output");
        assert_eq!(grad_output.quant_scale, 7168., "{case}: grad_output");
    }
}

/// Clones of a layer (a model that uses one layer in two places) are one layer.
#[test]
fn clones_share_their_state() {
    let layer = Layer::prepared("fc", 165, 2, 2);
    let clone = layer.linear.clone();
    {
        let _guard = open(delayed(4));
        layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
        clone.forward(&of(&[5., 0.], &[1, 2])).unwrap();
    }
    assert_eq!(slot(&clone, "input").history, [5., 0., 0., 0.]);
    assert_eq!(slot(&clone, "input"), layer.slot("input"));
}

#[test]
fn the_weight_history_rolls_once_per_change_of_the_weight() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let layer = Layer::prepared("fc", 170, 2, 2);
    let (x, go) = (of(&[2., 1.], &[1, 2]), of(&[1., 1.], &[1, 2]));
    let set = |w: f32| {
        layer
            .weight
            .set(&of(&[w, 0., 0., w / 2.], &[2, 2]))
            .unwrap()
    };
    let mut rolled = vec![];
    for (micro_batches, w) in [(3, 0.5), (1, 0.25), (2, 0.25), (2, 4.)] {
        set(w);
        for _ in 0..micro_batches {
            train(&layer, delayed(8), &x, &go);
        }
        rolled.push(
            layer
                .slot("weight")
                .history
                .iter()
                .filter(|&&amax| amax > 0.)
                .count(),
        );
    }
    assert_eq!(
        rolled,
        [1, 2, 2, 3],
        "entries after each block of micro-batches"
    );
    assert_eq!(
        layer.slot("weight").history[..4],
        [4., 0.25, 0.5, 0.],
        "newest first"
    );
    let inputs = layer.slot("input").history;
    assert!(
        inputs.iter().all(|&amax| amax == 2.),
        "the input rolls with every guard: {inputs:?}"
    );
}

/// Micro-batches under guards of their own multiply with the same codes.
#[test]
fn the_quantized_weight_stays_until_the_weight_changes() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let layer = Layer::prepared("fc", 175, 3, 4);
    let x = tensor(176, &[2, 4]);
    let go = tensor(177, &[2, 3]);
    for _ in 0..2 {
        layer
            .weight
            .set(&(layer.weight.as_tensor() * 1.5).unwrap())
            .unwrap();
        train(&layer, delayed(1), &x, &go);
    }
    layer
        .weight
        .set(&(layer.weight.as_tensor() * 0.3).unwrap())
        .unwrap();
    let counted = || layer.linear.fp8_state().unwrap().quantized_tensors();
    let first = train(&layer, delayed(1), &x, &go);
    let (before, scale) = (counted(), layer.slot("weight").quant_scale);
    let second = train(&layer, delayed(1), &x, &go);
    assert_eq!(counted() - before, 2, "x and grad_output only");
    assert_same("the second micro-batch", &second, &first);
    assert_eq!(
        layer.slot("weight").quant_scale,
        scale,
        "and no update of the weight"
    );
}

#[test]
fn a_non_finite_activation_or_gradient_is_counted_and_never_stored() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    for (case, bad) in [
        ("Inf", f32::INFINITY),
        ("-Inf", f32::NEG_INFINITY),
        ("NaN", f32::NAN),
    ] {
        let layer = Layer::prepared("fc", 180, 2, 2);
        let (x, go) = (of(&[2., 1.], &[1, 2]), of(&[1., 4.], &[1, 2]));
        train(&layer, delayed(4), &x, &go);
        end_step().unwrap();
        let before = slots(&layer.linear);
        let (bad_x, bad_go) = (of(&[bad, 1.], &[1, 2]), of(&[1., bad], &[1, 2]));
        train(&layer, delayed(4), &bad_x, &bad_go);
        end_step().unwrap();
        let mut expected = before.clone();
        (expected[0].non_finite, expected[2].non_finite) = (1, 1);
        assert_eq!(slots(&layer.linear), expected, "{case}");
        // Beside a finite micro-batch the finite amax counts.
        {
            let _guard = open(delayed(4));
            layer.linear.forward(&bad_x).unwrap();
            layer.linear.forward(&of(&[8., 0.], &[1, 2])).unwrap();
        }
        let input = layer.slot("input");
        assert_eq!(
            input.history,
            [8., 2., 0., 0.],
            "{case}: the finite micro-batch"
        );
        assert_eq!((input.quant_scale, input.non_finite), (56., 2), "{case}");
    }
}

#[test]
fn another_history_length_keeps_the_newest_amaxes() {
    let layer = Layer::prepared("fc", 190, 1, 1);
    let go = of(&[1.], &[1, 1]);
    let mut steps = 0;
    for (len, expected) in [
        (4, vec![1., 0., 0., 0.]),
        (4, vec![2., 1., 0., 0.]),
        (4, vec![3., 2., 1., 0.]),
        (2, vec![4., 3.]),
        (3, vec![5., 4., 3.]),
        (5, vec![6., 5., 4., 3., 0.]),
        (1, vec![7.]),
    ] {
        steps += 1;
        train(&layer, delayed(len), &of(&[steps as f32], &[1, 1]), &go);
        let input = layer.slot("input");
        assert_eq!(input.history, expected, "step {steps}, length {len}");
        assert_eq!(
            input.quant_scale,
            448. / steps as f32,
            "step {steps}, length {len}"
        );
    }
}

// ---- the reduction group ---------------------------------------------------------------------

/// Two ranks: the other one always reports `other`, shortened or repeated to the length asked for.
#[derive(Debug)]
struct TwoRanks {
    other: Vec<f32>,
    calls: Mutex<Vec<Vec<f32>>>,
}

impl TwoRanks {
    fn new(other: &[f32]) -> Arc<Self> {
        Arc::new(Self {
            other: other.to_vec(),
            calls: Mutex::default(),
        })
    }

    fn calls(&self) -> Vec<Vec<f32>> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl ReductionGroup for TwoRanks {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor> {
        let mine = amaxes.to_vec1::<f32>()?;
        self.calls.lock().unwrap().push(mine.clone());
        let max: Vec<f32> = mine
            .iter()
            .zip(self.other.iter().cycle())
            .map(|(a, b)| a.max(*b))
            .collect();
        Tensor::from_vec(max, mine.len(), amaxes.device())
    }
}

#[test]
fn the_reduction_group_gets_the_amaxes_of_the_whole_model() {
    let (mut a, mut b) = (Layer::new("a", 200, 1, 2), Layer::new("b", 202, 1, 2));
    let mut model = (a.linear.clone(), b.linear.clone());
    common::prepare(&mut model);
    (a.linear, b.linear) = model;
    a.weight.set(&of(&[0.5, 0.], &[1, 2])).unwrap();
    b.weight.set(&of(&[0.25, 0.], &[1, 2])).unwrap();
    let group = TwoRanks::new(&[1., 0.125, 1., 16., 0., 0.]);
    let guard = open(Autocast::new(delayed(2)).reduction_group(group.clone()));
    // Used in another order than named.
    let y = b.linear.forward(&of(&[4., 0.], &[1, 2])).unwrap();
    let z = a.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
    assert!(group.calls().is_empty(), "no call while the guard is open");
    guard.close().unwrap();
    assert_eq!(
        group.calls(),
        [[2., 0.5, 0., 4., 0.25, 0.]],
        "input, weight, grad_output of a, then of b"
    );
    backward(&y, &of(&[32.], &[1, 1]));
    backward(&z, &of(&[0.5], &[1, 1]));
    assert!(group.calls().is_empty(), "gradients wait");
    end_step().unwrap();
    assert_eq!(group.calls(), [[0., 0., 0.5, 0., 0., 32.]], "gradients");
    let history = |layer: &Layer, role: &str| layer.slot(role).history[0];
    assert_eq!(
        (history(&a, "input"), history(&a, "weight")),
        (2., 0.5),
        "mine are larger"
    );
    assert_eq!(
        (history(&b, "input"), history(&b, "weight")),
        (16., 0.25),
        "b.input of the other"
    );
    assert_eq!(
        (history(&a, "grad_output"), history(&b, "grad_output")),
        (1., 32.)
    );
    assert_eq!(
        b.slot("input").quant_scale,
        28.,
        "the scale is made of the maximum"
    );
}

#[test]
fn the_reduction_group_is_left_alone_where_nothing_is_to_be_reduced() {
    let x = of(&[2., 1.], &[1, 2]);
    let go = of(&[1., 1.], &[1, 2]);
    let cases: [(&str, Recipe, bool, bool); 5] = [
        ("delayed", delayed(2).into(), true, true),
        (
            "delayed, reduce_amax off",
            delayed(2).with_reduce_amax(false).into(),
            true,
            false,
        ),
        ("delayed, evaluation", delayed(2).into(), false, false),
        ("tensorwise", recipe("tensorwise"), true, false),
        ("rowwise", recipe("rowwise"), true, false),
    ];
    for (case, recipe, training, called) in cases {
        let layer = Layer::prepared("fc", 205, 2, 2);
        let group = TwoRanks::new(&[64.]);
        let autocast = Autocast::new(recipe)
            .training(training)
            .reduction_group(group.clone());
        train(&layer, autocast, &x, &go);
        end_step().unwrap();
        assert_eq!(!group.calls().is_empty(), called, "{case}: called");
        let stored = layer.slot("input").history.contains(&64.);
        assert_eq!(stored, called, "{case}: the other rank's amax");
    }
    let layer = Layer::prepared("fc", 205, 2, 2);
    let autocast = Autocast::new(delayed(2)).reduction_group(Arc::new(SingleProcess));
    train(&layer, autocast, &x, &go);
    assert_eq!(
        layer.slot("input").history,
        [2., 0.],
        "a job of one process"
    );
}

#[test]
fn the_group_of_the_innermost_guard_counts() {
    let (outer, inner) = (TwoRanks::new(&[8.]), TwoRanks::new(&[16.]));
    let with = |group: &Arc<TwoRanks>| Autocast::new(delayed(2)).reduction_group(group.clone());
    for (case, guards, expected) in [
        ("two groups", vec![with(&outer), with(&inner)], 16.),
        ("none outside", vec![delayed(2).into(), with(&inner)], 16.),
        ("none inside", vec![with(&outer), delayed(2).into()], 2.),
    ] {
        let layer = Layer::prepared("fc", 207, 2, 2);
        {
            let _nest = Nest::open(&guards);
            layer.linear.forward(&of(&[2., 0.], &[1, 2])).unwrap();
        }
        assert_eq!(layer.slot("input").history[0], expected, "{case}");
    }
}

#[derive(Debug)]
struct Broken;

impl ReductionGroup for Broken {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, _: &Tensor) -> Result<Tensor> {
        candle_core::bail!("rank 1 does not answer")
    }
}

#[test]
fn close_reports_what_drop_only_logs() {
    let layer = Layer::prepared("fc", 208, 2, 2);
    let x = of(&[2., 0.], &[1, 2]);
    let autocast = || Autocast::new(delayed(2)).reduction_group(Arc::new(Broken));
    let guard = open(autocast());
    layer.linear.forward(&x).unwrap();
    assert_text(
        "close",
        guard.close().unwrap_err(),
        &["rank 1 does not answer"],
    );
    // The gradients of that step are reduced at the next use: a layer says so.
    let guard = open(autocast());
    let error = layer.linear.forward(&x).unwrap_err();
    assert_text("forward", error, &["rank 1 does not answer"]);
    guard.abort();
    let other = Layer::prepared("other", 208, 2, 2);
    {
        let _guard = open(autocast());
        other.linear.forward(&x).unwrap();
    }
    assert!(!is_fp8_enabled(), "and the guard is gone either way");
    assert_eq!(
        layer.slot("input").quant_scale,
        1.,
        "no update without the other rank"
    );
}

// ---- backward --------------------------------------------------------------------------------

#[test]
fn backward_uses_what_forward_captured_whatever_guard_is_alive() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    for (name, recipe) in common::recipes() {
        let x = var(211, &[5, 8]);
        let go = tensor(212, &[5, 4]);
        let gradients = |place: &str| {
            let layer = Layer::prepared("fc", 210, 4, 8);
            for _ in 0..2 {
                train(&layer, recipe.clone(), &x, &go);
            }
            let guard = open(recipe.clone());
            let y = layer.linear.forward(&x).unwrap();
            let grads = match place {
                "inside" => {
                    let grads = backward(&y, &go);
                    drop(guard);
                    grads
                }
                "after the close" => {
                    drop(guard);
                    backward(&y, &go)
                }
                "inside a disabled guard" => {
                    drop(guard);
                    let _guard = open(Autocast::disabled());
                    backward(&y, &go)
                }
                "inside an evaluation guard" => {
                    drop(guard);
                    let _guard = open(Autocast::new(recipe.clone()).training(false));
                    backward(&y, &go)
                }
                "inside another recipe, nested" => {
                    let inner = open(Fp8LinearConfig::default().with_emulate(true));
                    let grads = backward(&y, &go);
                    drop((inner, guard));
                    grads
                }
                "on another thread" => {
                    drop(guard);
                    in_private_pool(|| backward(&y, &go))
                }
                _ => unreachable!("{place}"),
            };
            let grad = |var: &Var| grads.get(var).unwrap().clone();
            let grads = [grad(&x), grad(&layer.weight), grad(&layer.bias)];
            end_step().unwrap();
            (grads, slots(&layer.linear))
        };
        let (expected, state) = gradients("inside");
        for place in [
            "after the close",
            "inside a disabled guard",
            "inside an evaluation guard",
            "inside another recipe, nested",
            "on another thread",
        ] {
            let (got, got_state) = gradients(place);
            for (what, (got, expected)) in TENSORS[1..].iter().zip(got.iter().zip(&expected)) {
                assert_same(&format!("{name}, backward {place}, {what}"), got, expected);
            }
            assert_eq!(got_state, state, "{name}, backward {place}: state");
        }
        // The gradients are those of FP8, not of the plain layer.
        let layer = Layer::new("fc", 210, 4, 8);
        let plain = run(&layer, &layer.stock(), &x, &go, &[]);
        assert_differ(&format!("{name}, grad_x"), &expected[0], &plain[1]);
        let high_precision = name == "rowwise_with_gw_hp";
        let same = bits(&expected[1]) == bits(&plain[2]);
        assert_eq!(
            same, high_precision,
            "{name}: grad_weight as the plain layer's"
        );
        assert_close(&format!("{name}, grad_x"), &expected[0], &plain[1], 0.2);
        assert_close(
            &format!("{name}, grad_weight"),
            &expected[1],
            &plain[2],
            0.2,
        );
    }
}

/// A recipe of another step does not reach back into a graph made before.
#[test]
fn backward_of_an_older_step_keeps_its_operands() {
    let layer = Layer::prepared("fc", 220, 4, 8);
    let x = var(221, &[5, 8]);
    let go = tensor(222, &[5, 4]);
    let forward = || {
        let _guard = open(recipe("tensorwise"));
        layer.linear.forward(&x).unwrap()
    };
    let grads = backward(&forward(), &go);
    let expected = grads.get(&x).unwrap().clone();
    let y = forward();
    for name in ["rowwise", "delayed"] {
        let _guard = open(recipe(name));
        layer
            .linear
            .forward(&(x.as_tensor() * 50.).unwrap())
            .unwrap();
    }
    let grads = backward(&y, &go);
    assert_same("grad_x", grads.get(&x).unwrap(), &expected);
}

// ---- other configurations --------------------------------------------------------------------

#[test]
fn delayed_casts_of_a_custom_configuration_are_updated() {
    let delayed_cast = CastConfig::delayed_tensorwise;
    let dynamic = CastConfig::dynamic_tensorwise();
    let cases: [(&str, Fp8LinearConfig, [bool; 3]); 4] = [
        (
            "input only",
            Fp8LinearConfig::default().with_input(delayed_cast()),
            [true, false, false],
        ),
        (
            "weight and gradient",
            Fp8LinearConfig::default()
                .with_weight(delayed_cast())
                .with_grad_output(delayed_cast().with_format(Format::E4M3)),
            [false, true, true],
        ),
        (
            "input, only for the weight's gradient",
            Fp8LinearConfig::default().with_input_for_grad_weight(Some(delayed_cast())),
            [true, false, false],
        ),
        (
            "none",
            Fp8LinearConfig::default().with_input(dynamic),
            [false, false, false],
        ),
    ];
    for (case, config, updated) in cases {
        let layer = Layer::prepared("fc", 230, 2, 2);
        let (x, go) = (of(&[2., 1.], &[1, 2]), of(&[8., 1.], &[1, 2]));
        // Twice: a cast of the backward pass is updated one step later.
        for _ in 0..2 {
            train(&layer, config.clone(), &x, &go);
        }
        end_step().unwrap();
        let slots = slots(&layer.linear);
        let got = slots.each_ref().map(|slot| slot.quant_scale != 1.);
        assert_eq!(got, updated, "{case}: input, weight, grad_output");
        let max = if case == "weight and gradient" {
            448.
        } else {
            57344.
        };
        let scales = [448. / 2., 448. / amax(&layer.weight), max / 8.];
        for ((slot, scale), updated) in slots.iter().zip(scales).zip(updated) {
            if updated {
                assert_eq!(slot.quant_scale, scale, "{case}");
                assert_eq!(slot.history.len(), 1024, "{case}: the default history");
            }
        }
    }
    // Power-of-two scales of the configuration hold for its delayed casts.
    let layer = Layer::prepared("fc", 230, 2, 2);
    let config = Fp8LinearConfig::default()
        .with_input(delayed_cast())
        .with_round_scales_to_power_of_two(true);
    train(
        &layer,
        config,
        &of(&[2., 1.], &[1, 2]),
        &of(&[8., 1.], &[1, 2]),
    );
    assert_eq!(
        layer.slot("input").quant_scale,
        128.,
        "448 / 2 floored to a power of two"
    );
}

#[test]
fn a_static_recipe_needs_a_calibration_and_then_uses_its_scales() {
    let static_cast = CastConfig::static_tensorwise();
    let config = Fp8LinearConfig::default()
        .with_input(static_cast)
        .with_weight(static_cast);
    let layer = Layer::prepared("blocks.0.fc", 240, 2, 2);
    let x = of(&[2., 1.], &[1, 2]);
    let forward = || {
        let _guard = open(Autocast::new(config.clone()).training(false));
        layer.linear.forward(&x)
    };
    assert_text(
        "not calibrated",
        forward().unwrap_err(),
        &["blocks.0.fc.input", "calibrate"],
    );
    for value in [3.5, 7.] {
        let _guard = open(Autocast::new(config.clone()).calibrating(true));
        layer.linear.forward(&of(&[value, 0.], &[1, 2])).unwrap();
    }
    assert_eq!(
        layer.slot("input").quant_scale,
        64.,
        "the largest of all batches"
    );
    let plain = layer.stock().forward(&x).unwrap();
    assert_close("static", &forward().unwrap(), &plain, 0.1);
}

#[test]
fn an_inconsistent_recipe_opens_no_guard() {
    let rowwise_delayed = CastConfig::delayed_tensorwise().with_granularity(Granularity::Rowwise);
    for (recipe, parts) in [
        (Recipe::from(delayed(0)), ["amax_history_len", "0"]),
        (
            Fp8LinearConfig::default()
                .with_input(CastConfig::disabled())
                .into(),
            ["output", "input"],
        ),
        (
            Fp8LinearConfig::default()
                .with_weight(rowwise_delayed)
                .into(),
            ["weight", "rowwise"],
        ),
    ] {
        let error = fp8_autocast(recipe.clone()).unwrap_err();
        assert_text(&format!("{recipe:?}"), error, &parts);
        assert!(!is_fp8_enabled(), "{recipe:?}");
    }
    let _outer = open(recipe("tensorwise"));
    assert!(fp8_autocast(delayed(0)).is_err());
    assert!(is_fp8_enabled(), "the outer guard is as it was");
}

#[test]
fn an_input_of_the_wrong_width_or_kind_names_the_layer() {
    let layer = Layer::prepared("blocks.3.fc", 250, 4, 8);
    for guards in [
        vec![],
        vec![Autocast::default()],
        vec![Autocast::disabled()],
    ] {
        let _nest = Nest::open(&guards);
        let error = layer.linear.forward(&tensor(1, &[3, 7])).unwrap_err();
        assert_text(
            "width",
            error,
            &["blocks.3.fc", "[3, 7]", "7 features", "expected 8"],
        );
        let integers = Tensor::zeros((3, 8), DType::U32, &device()).unwrap();
        let error = layer.linear.forward(&integers).unwrap_err();
        assert_text("dtype", error, &["blocks.3.fc", "u32"]);
    }
}

#[test]
fn a_step_on_a_new_thread_settles_the_gradients_of_the_one_before() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    let control = Layer::prepared("l", 3, 6, 8);
    for _ in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| train(&layer, delayed(4), &x, &go));
        });
        train(&control, delayed(4), &x, &go);
    }
    end_step().unwrap();
    // The last backward pass of the threads waits for a next step.
    std::thread::scope(|scope| {
        scope.spawn(|| train(&layer, delayed(4), &x, &go));
    });
    assert_eq!(layer.slot("grad_output"), control.slot("grad_output"));
    assert_ne!(layer.slot("grad_output").quant_scale, 1.);
}

#[test]
fn a_training_guard_inside_an_evaluation_guard_begins_a_step() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    train(&layer, delayed(4), &x, &go);
    assert_eq!(layer.slot("grad_output").quant_scale, 1.);
    let _evaluation = open(Autocast::new(delayed(4)).training(false));
    assert_eq!(layer.slot("grad_output").quant_scale, 1.);
    let _training = open(delayed(4));
    layer.linear.forward(&x).unwrap();
    assert_eq!(
        layer.slot("grad_output").quant_scale,
        57344. / amax(&go),
        "settled when the step uses the model"
    );
}

#[test]
fn calibrating_again_keeps_the_inputs_seen_but_not_the_old_weight() {
    let layer = Layer::prepared("l", 3, 6, 8);
    let calibrate = |x: &Tensor| {
        let _guard = open(Autocast::new(delayed(4)).calibrating(true));
        layer.linear.forward(x).unwrap();
    };
    calibrate(&of(&[8.; 8], &[1, 8]));
    layer.weight.set(&of(&[0.5; 48], &[6, 8])).unwrap();
    calibrate(&of(&[2.; 8], &[1, 8]));
    // Calibration makes dequant_scale = amax / MAX; quant_scale is its reciprocal.
    assert_eq!(layer.slot("input").quant_scale, 1. / (8. / 448.));
    assert_eq!(layer.slot("weight").quant_scale, 1. / (0.5 / 448.));
}

#[test]
fn an_inner_recipe_without_delayed_casts_keeps_the_update_of_the_outer_one() {
    let (x, go) = (tensor(1, &[4, 8]), tensor(2, &[4, 6]));
    let layer = Layer::prepared("l", 3, 6, 8);
    let guard = open(delayed(4));
    let y = layer.linear.forward(&x).unwrap();
    {
        let _inner = open(recipe("tensorwise"));
        layer.linear.forward(&x).unwrap();
    }
    guard.close().unwrap();
    backward(&y, &go);
    end_step().unwrap();
    assert_eq!(layer.slot("input").quant_scale, 448. / amax(&x));
    assert_eq!(layer.slot("grad_output").quant_scale, 57344. / amax(&go));
}
