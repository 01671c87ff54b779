//! Guards and rayon pools. A waiting worker runs other tasks of its pool on the same stack, inside whatever guard is open.

use candle_core::{Device, Module, Tensor};
use fp8::{Autocast, AutocastHandle, Error, end_step, fp8_autocast, is_fp8_enabled};
use fp8_test_support::{
    Layer, assert_same, assert_text, bits, delayed, flat, skipped_on_cuda, slots, tensor,
};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

const THREADS: &str = "the threads share what lives on the device of one of them";

fn pool(threads: usize) -> rayon::ThreadPool {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build().unwrap()
}

#[test]
fn no_guard_opens_on_a_worker() {
    let guard = fp8_autocast(delayed(4)).unwrap();
    let handle = guard.handle();
    for pool in [pool(1), pool(2), pool(3)] {
        pool.install(|| {
            let parts = ["worker", "AutocastHandle::run"];
            assert_text("guard", fp8_autocast(delayed(4)).unwrap_err(), &parts);
            assert_text("handle", handle.open().unwrap_err(), &parts);
            let disabled = fp8_autocast(Autocast::disabled());
            assert!(matches!(
                disabled,
                Err(Error::Guard(fp8::GuardError::OnPoolWorker { .. }))
            ));
            assert!(!is_fp8_enabled());
        });
    }
    Device::Cpu.with_context(|| {
        let parts = ["worker", "AutocastHandle::run"];
        assert_text("candle's pool", handle.open().unwrap_err(), &parts);
    });
    // Threads outside of pools may open guards.
    std::thread::scope(|scope| {
        scope.spawn(|| handle.open().unwrap().close().unwrap());
    });
}

/// Large enough for GEMMs, candle's too, to use several threads and wait for them.
const SIZE: usize = 256;

/// Many models and plain tasks in one pool. Plain tasks never compute in FP8, and every model gets its updates.
#[test]
fn tasks_of_one_pool_see_no_guard_but_their_own() {
    if skipped_on_cuda(THREADS) {
        return;
    }
    let x = tensor(1, &[32, SIZE]);
    let plain = Layer::new("plain", 2, SIZE, SIZE);
    let expected = bits(&plain.linear.forward(&x).unwrap());
    let control = Layer::prepared("fc", 3, SIZE, SIZE);
    let models: Vec<Layer> = (0..8)
        .map(|_| Layer::prepared("fc", 3, SIZE, SIZE))
        .collect();
    let watched = Layer::prepared("watched", 4, SIZE, SIZE);
    let watched_plain = bits(&watched.linear.forward(&x).unwrap());
    let (wrong, plain_tasks) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for pool in [pool(2), pool(4)] {
        for round in 0..6 {
            pool.install(|| {
                (0..models.len() * 8).into_par_iter().for_each(|task| {
                    if task % 8 == 0 {
                        // A model with a guard, on a thread of its own.
                        let model = &models[task / 8];
                        AutocastHandle::current()
                            .run(|| {
                                let guard = fp8_autocast(delayed(4)).unwrap();
                                let y = model.linear.forward(&x).unwrap();
                                y.matmul(&y.t().unwrap()).unwrap();
                                guard.close().unwrap();
                            })
                            .unwrap();
                    } else {
                        // A prepared layer as well: it would compute in FP8 under any guard.
                        let (y, want) = match task % 2 {
                            0 => (plain.linear.forward(&x).unwrap(), &expected),
                            _ => (watched.linear.forward(&x).unwrap(), &watched_plain),
                        };
                        plain_tasks.fetch_add(1, Ordering::Relaxed);
                        let seen = is_fp8_enabled() || bits(&y) != *want;
                        wrong.fetch_add(seen.into(), Ordering::Relaxed);
                    }
                });
            });
            assert_eq!(wrong.load(Ordering::Relaxed), 0, "round {round}");
        }
    }
    assert_eq!(plain_tasks.load(Ordering::Relaxed), 2 * 6 * 56);
    for _ in 0..12 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        control.linear.forward(&x).unwrap();
        guard.close().unwrap();
    }
    for model in &models {
        assert_eq!(slots(&model.linear), slots(&control.linear));
    }
}

/// A pool's only worker runs other tasks too: while it waits for another pool, and when it yields.
#[test]
fn tasks_of_a_pool_of_one_thread_see_no_guard_but_their_own() {
    if skipped_on_cuda(THREADS) {
        return;
    }
    const TASKS: usize = 100;
    let x = tensor(1, &[32, SIZE]);
    let layer = Layer::prepared("fc", 3, SIZE, SIZE);
    let plain = bits(&layer.linear.forward(&x).unwrap());
    let (wrong, served) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let task = || {
        let y = layer.linear.forward(&x).unwrap();
        let seen = is_fp8_enabled() || bits(&y) != plain;
        wrong.fetch_add(seen.into(), Ordering::Relaxed);
        served.fetch_add(1, Ordering::Relaxed);
    };
    let other = pool(2);
    // A task that makes others wait, with a guard where one opens.
    let waits: [&(dyn Fn() + Sync); 2] = [
        // Yields until the worker has nothing else to do.
        &|| while rayon::yield_now() == Some(rayon::Yield::Executed) {},
        &|| other.install(|| std::thread::sleep(std::time::Duration::from_millis(1))),
    ];
    for wait in waits {
        pool(1).scope(|scope| {
            for _ in 0..TASKS {
                scope.spawn(|_| {
                    let _guard = fp8_autocast(delayed(4)).ok();
                    wait();
                });
                scope.spawn(|_| task());
            }
        });
    }
    // Only work that asks for a guard gets one, not the tasks that run meanwhile.
    pool(1).scope(|scope| {
        for _ in 0..TASKS {
            scope.spawn(|_| {
                let forward = || {
                    let guard = fp8_autocast(delayed(4)).unwrap();
                    let y = layer.linear.forward(&x).unwrap();
                    guard.close().unwrap();
                    y
                };
                let y = AutocastHandle::current().run(forward).unwrap();
                assert_ne!(bits(&y), plain);
            });
            scope.spawn(|_| task());
        }
    });
    assert_eq!(served.into_inner(), 3 * TASKS);
    assert_eq!(wrong.into_inner(), 0);
}

/// Many tasks use the model of one guard at once.
#[test]
fn a_handle_carries_one_guard_into_many_tasks() {
    if skipped_on_cuda(THREADS) {
        return;
    }
    let layer = Layer::prepared("fc", 5, SIZE, SIZE);
    let guard = fp8_autocast(delayed(4)).unwrap();
    let handle = guard.handle();
    let run = |i: usize| {
        let x = (tensor(6, &[32, SIZE]) * i as f64).unwrap();
        let forward = || {
            // Inner guards work there as on any thread.
            let inner = fp8_autocast(Autocast::disabled()).unwrap();
            assert!(!is_fp8_enabled());
            inner.close().unwrap();
            assert!(is_fp8_enabled());
            layer.linear.forward(&x).unwrap()
        };
        handle.run(forward).unwrap()
    };
    let outputs: Vec<Tensor> = pool(3).install(|| (1..=16).into_par_iter().map(run).collect());
    let global: Vec<Tensor> = (1..=16).into_par_iter().map(run).collect();
    let candles = Device::Cpu.with_context(|| run(16));
    for (a, b) in outputs.iter().zip(&global) {
        assert_same("another pool", a, b);
    }
    assert_same("candle's pool", &candles, &outputs[15]);
    let summary = guard.close().unwrap();
    assert_eq!(summary.layers(), 1);
    // Several tasks may cast the weight, if none has finished casting it before.
    assert!(summary.casts() > 33, "{}", summary.casts());
    let amax = 16.
        * flat(&tensor(6, &[32, SIZE]))
            .iter()
            .fold(0f32, |m, x| m.max(x.abs()));
    assert_eq!(layer.slot("input").history, [amax, 0., 0., 0.]);
    end_step().unwrap();
}

#[test]
fn a_panic_in_a_task_comes_through_and_leaves_the_guard_usable() {
    let guard = fp8_autocast(delayed(4)).unwrap();
    let handle = guard.handle();
    let pool = pool(2);
    for _ in 0..3 {
        let task = || handle.run(|| panic!("in the task"));
        let run = std::panic::AssertUnwindSafe(|| pool.install(task));
        let panic = std::panic::catch_unwind(run).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"in the task"));
    }
    assert_eq!(pool.install(|| handle.run(|| 7)).unwrap(), 7);
    guard.close().unwrap();
}
