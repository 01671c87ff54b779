//! Delayed scaling: what enters a history and what does not.

use crate::helpers::*;
use candle_core::Module;
use fp8::end_step;
use fp8_test_support::{Layer, assert_same, delayed, of, skipped_on_cuda, slot, slots, tensor};

#[test]
fn several_uses_in_a_step_and_micro_batches_are_merged_by_maximum() {
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

/// Clones of a layer, as in a model that uses it in two places, have one state.
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

/// Micro-batches with a guard each use the same codes of the weight.
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
        // With a second micro-batch that is finite, the finite amax counts.
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
