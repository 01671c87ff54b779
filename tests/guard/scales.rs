//! Delayed scaling: the scales of each step against numbers computed by hand.

use crate::helpers::*;
use fp8::config::{DelayedFormat, DelayedScaling, InitialScale};
use fp8::end_step;
use fp8::fp8_core::{AmaxCompute, ScaleRounding};
use fp8_test_support::{Layer, delayed, flat, of, skipped_on_cuda, slots, tensor};

/// The amaxes of x, weight and output gradient in each step.
const TRACE: [[f32; 3]; 6] = [
    [2., 0.5, 8.],
    [4., 0.25, 2.],
    [1., 0.125, 16.],
    [0.5, 1., 1.],
    [0.25, 0.0625, 1.],
    [0.125, 0.03125, 0.5],
];

/// The quant_scales after each step, computed by hand from `max * 2^-margin / amax(history)`.
type Expected = [[f32; 3]; 6];

#[test]
fn the_scales_of_a_layer_equal_those_computed_by_hand() {
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

/// In E4M3, 0.3 becomes 0.3125 with scale 1, and 448 with scale 448 / 0.3; 1000 saturates at 448 with scale 1.
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
            f64::from((got - expected).abs()) <= SCALED * f64::from(expected),
            "{case}: got {got}, expected {expected}"
        );
    }
}

#[test]
fn the_first_batch_with_a_usable_amax_sets_the_initial_scale() {
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
            f64::from((y - 0.15).abs()) <= SCALED * 0.15,
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
fn unused_layers_and_zero_amaxes_change_no_history_and_no_scale() {
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
