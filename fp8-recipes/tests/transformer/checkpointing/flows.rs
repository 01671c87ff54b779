//! Other uses: evaluation, calibration, no guard, handles, threads, guards within the function.

use super::harness::{CPU, Cut, Training, bits, tensor};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::ModuleT;
use fp8_recipes::nn::{self, BatchNormConfig, checkpoint, checkpoint_many};
use fp8_recipes::{
    Autocast, AutocastHandle, RecipeName, end_step, fp8_autocast, prepare_fp8, with_fp8,
};

/// What `run` makes of each cut, after a step that leaves scales behind.
fn all_same(run: impl Fn(&Training) -> Vec<String>) {
    let seen = |cut| {
        let training = Training::new(cut);
        let x = tensor(1, &[2, 8, 32]);
        let loss = with_fp8("delayed", || training.loss(&x, 3)).unwrap();
        training.step(&loss.backward().unwrap());
        let mut seen = run(&training);
        seen.push(training.trace());
        seen
    };
    let plain = seen(Cut::Nowhere);
    for cut in [Cut::Layers, Cut::Nested] {
        assert_eq!(seen(cut), plain, "{cut:?}");
    }
}

fn grads_of(training: &Training, loss: &Tensor, grads: &GradStore) -> Vec<String> {
    let mut seen = vec![format!("{:?}", bits(loss))];
    let grads = training.step(grads).into_iter();
    seen.extend(grads.map(|grad| format!("{grad:?}")));
    seen
}

#[test]
fn evaluation_and_high_precision_and_no_guard() {
    let x = tensor(2, &[2, 8, 32]);
    for autocast in [
        Some(Autocast::new(RecipeName::Delayed).training(false)),
        Some(Autocast::new(RecipeName::Hybrid).training(false)),
        Some(Autocast::disabled()),
        None,
    ] {
        all_same(|training| {
            let forward = || training.loss(&x, 9);
            let loss = match &autocast {
                Some(autocast) => with_fp8(autocast.clone(), forward),
                None => forward(),
            };
            let loss = loss.unwrap();
            grads_of(training, &loss, &loss.backward().unwrap())
        });
    }
}

#[test]
fn calibration_sees_a_batch_once() {
    let x = tensor(2, &[2, 8, 32]);
    all_same(|training| {
        let guard = fp8_autocast(Autocast::new(RecipeName::Tensorwise).calibrating(true)).unwrap();
        let loss = training.loss(&x, 9).unwrap();
        let grads = loss.backward().unwrap();
        let summary = guard.close().unwrap();
        let mut seen = grads_of(training, &loss, &grads);
        seen.push(format!("{} {}", summary.casts(), summary.layers()));
        seen
    });
}

#[test]
fn on_other_threads() {
    let x = tensor(2, &[2, 8, 32]);
    all_same(|training| {
        let guard = fp8_autocast("delayed").unwrap();
        let handle = guard.handle();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(2)
            .build()
            .unwrap();
        let loss = pool
            .install(|| handle.run(|| training.loss(&x, 9)))
            .unwrap()
            .unwrap();
        guard.close().unwrap();
        // On a worker of a pool, where no guard opens.
        let grads = pool.install(|| loss.backward()).unwrap();
        grads_of(training, &loss, &grads)
    });
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let x = tensor(2, &[2, 8, 32]);
    all_same(|training| {
        let guard = fp8_autocast("delayed").unwrap();
        let loss = training.loss(&x, 9).unwrap();
        guard.abort();
        grads_of(training, &loss, &loss.backward().unwrap())
    });
}

#[test]
fn a_graph_can_be_swept_twice() {
    let x = tensor(2, &[2, 8, 32]);
    all_same(|training| {
        let loss = with_fp8("hybrid", || training.loss(&x, 9)).unwrap();
        let mut seen = vec![];
        let all = [loss.backward().unwrap(), loss.backward().unwrap()];
        for grads in all {
            seen.extend(grads_of(training, &loss, &grads));
        }
        seen
    });
}

/// A linear layer that has taken a step.
fn linear() -> (nn::Linear, Var) {
    let weight = Var::from_tensor(&tensor(5, &[8, 32])).unwrap();
    let layer = nn::Linear::new(weight.as_tensor().clone(), None).with_path("fc");
    prepare_fp8(&layer, &Default::default()).unwrap();
    (layer, weight)
}

#[test]
fn a_guard_within_the_function_is_one_step() {
    let x = Var::from_tensor(&tensor(2, &[4, 32])).unwrap();
    let seen = |cut: bool| {
        let (layer, weight) = linear();
        let own = layer.clone();
        let f = move |x: &Tensor| -> fp8_recipes::Result<Tensor> {
            let handle = AutocastHandle::current();
            let y = with_fp8("delayed", || own.try_forward(x))?;
            end_step()?;
            // The context around, which is none.
            let z = handle.run(|| own.try_forward(x))??;
            Ok((y + z)?)
        };
        let y = match cut {
            true => checkpoint(f, x.as_tensor()).unwrap(),
            false => f(x.as_tensor()).unwrap(),
        };
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let grads = [&x, &weight].map(|var| bits(grads.get(var).unwrap()));
        let state = layer.fp8_state().unwrap();
        let rows = state.table().save().unwrap();
        format!(
            "{:?} {grads:?} {rows:?} {}",
            bits(&y),
            state.quantized_tensors()
        )
    };
    assert_eq!(seen(true), seen(false));
}

#[test]
fn a_handle_from_outside_opens_in_the_second_run() {
    let x = Var::from_tensor(&tensor(2, &[4, 32])).unwrap();
    let seen = |cut: bool| {
        let (layer, weight) = linear();
        let own = layer.clone();
        let guard = fp8_autocast("delayed").unwrap();
        let handle = guard.handle();
        let f = move |x: &Tensor| handle.run(|| own.try_forward(x))?;
        let y = match cut {
            true => checkpoint(f, x.as_tensor()).unwrap(),
            false => f(x.as_tensor()).unwrap(),
        };
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let grads = [&x, &weight].map(|var| bits(grads.get(var).unwrap()));
        let state = layer.fp8_state().unwrap();
        let rows = state.table().save().unwrap();
        format!(
            "{:?} {grads:?} {rows:?} {}",
            bits(&y),
            state.quantized_tensors()
        )
    };
    assert_eq!(seen(true), seen(false));
}

#[test]
fn running_statistics_follow_a_batch_once() {
    let x = Var::from_tensor(&tensor(2, &[6, 4])).unwrap();
    let seen = |cut: bool| {
        let vars = candle_nn::VarMap::new();
        let vb = candle_nn::VarBuilder::from_varmap(&vars, candle_core::DType::F32, CPU);
        let norm = nn::batch_norm(4, BatchNormConfig::default(), vb).unwrap();
        let own = norm.clone();
        let f = move |x: &Tensor| own.forward_t(x, true);
        let y = match cut {
            true => checkpoint(f, x.as_tensor()).unwrap(),
            false => f(x.as_tensor()).unwrap(),
        };
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let grad = bits(grads.get(&x).unwrap());
        (grad, bits(norm.running_mean()), bits(norm.running_var()))
    };
    assert_eq!(seen(true), seen(false));
}

#[test]
fn constants_get_no_gradient() {
    let (x, w) = (
        tensor(2, &[3, 4]),
        Var::from_tensor(&tensor(3, &[4])).unwrap(),
    );
    let rows = Tensor::new(&[2u32, 0], CPU).unwrap();
    let weight = w.as_tensor().clone();
    let f = move |args: &[Tensor]| {
        assert!(!args[0].track_op() && !args[1].track_op());
        args[0].index_select(&args[1], 0)?.broadcast_mul(&weight)
    };
    let y = checkpoint_many(f, &[&x, &rows]).unwrap();
    assert!(y.track_op());
    let grads = y.sum_all().unwrap().backward().unwrap();
    let sum = x.index_select(&rows, 0).unwrap().sum(0).unwrap();
    assert_eq!(bits(grads.get(&w).unwrap()), bits(&sum));
    // And nothing at all: no graph.
    let y = checkpoint(|x: &Tensor| x.sqr(), &x).unwrap();
    assert!(!y.track_op());
}
