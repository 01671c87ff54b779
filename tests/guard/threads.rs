//! Guards and their handles on several threads.

use crate::helpers::*;
use candle_core::{Device, Module};
use fp8::nn::Linear;
use fp8::{Autocast, AutocastGuard, AutocastHandle, end_step, is_fp8_enabled};
use fp8_test_support::{Layer, assert_same, bits, delayed, of, skipped_on_cuda, slots, tensor};
use std::sync::Barrier;

/// Tells at compile time whether a type is `Send` or `Sync`: where it is, the inherent constant hides that of the trait.
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
fn guards_are_not_send_and_handles_and_recipes_are() {
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

/// The step of a model begins once, before the first of its casts on any thread.
#[test]
fn what_the_first_casts_of_threads_see_counts() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    let x = of(&[f32::INFINITY; 16], &[2, 8]);
    for round in 0..300 {
        let layer = Layer::prepared("fc", 80, 4, 8);
        let guard = open(recipe("delayed"));
        let (handle, together) = (guard.handle(), Barrier::new(3));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let _guard = handle.open().unwrap();
                    together.wait();
                    layer.linear.forward(&x).unwrap();
                });
            }
        });
        let summary = guard.close().unwrap();
        assert!(
            summary.first_non_finite().unwrap().is_some(),
            "round {round}"
        );
    }
}

#[test]
fn two_threads_train_with_two_recipes_at_once() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    let x = tensor(81, &[6, 8]);
    let go = tensor(82, &[6, 4]);
    let names = ["tensorwise", "rowwise", "delayed"];
    // Three steps: their outputs, and the state after them.
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
        // This thread has no guard, although the other threads have open ones.
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
fn the_amaxes_of_many_threads_under_one_guard_are_merged_by_maximum() {
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
                // The threads open guards too; the step still belongs to the first one.
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
fn a_handle_taken_without_a_guard_gives_high_precision() {
    let layer = Layer::prepared("fc", 97, 4, 8);
    let x = tensor(98, &[5, 8]);
    let handle = AutocastHandle::current();
    let guard = open(delayed(4));
    let y = handle.run(|| layer.linear.forward(&x).unwrap()).unwrap();
    guard.close().unwrap();
    assert_same("no guard", &y, &layer.stock().forward(&x).unwrap());
}

thread_local! {
    static KEPT: std::cell::RefCell<Option<AutocastGuard>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn a_guard_kept_until_its_thread_ends_closes_its_step() {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return;
    }
    // Thread-locals are dropped in the reverse order of their first use: the guard, or the frames of the thread's guards.
    for frames_first in [false, true] {
        let layer = Layer::prepared("fc", 99, 4, 8);
        let x = tensor(98, &[5, 8]);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                if frames_first {
                    assert!(!is_fp8_enabled());
                }
                KEPT.with_borrow_mut(|kept| *kept = Some(open(delayed(4))));
                layer.linear.forward(&x).unwrap();
            });
            // The end of a scope alone does not wait for destructors.
            thread.join().unwrap();
        });
        let history = layer.slot("input").history;
        assert_eq!(history[0], amax(&x), "frames first: {frames_first}");
    }
}
