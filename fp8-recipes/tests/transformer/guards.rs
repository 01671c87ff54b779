//! A guard decides about casts and nothing else.

use crate::support::*;
use candle_core::DType;
use fp8_recipes::nn::AttentionConfig;
use fp8_recipes::{Autocast, PrepareOptions, RecipeName, prepare_fp8};
use fp8_test_support::assert_differ;

const OPERANDS: [Option<DType>; 3] = [None, Some(DType::F32), Some(DType::BF16)];

#[test]
fn layers_without_casts_compute_the_same_in_a_guard() {
    for operands in OPERANDS {
        let own = AttentionConfig::new(HEADS, 16).with_operands(operands);
        let config = config().with_attention(own);
        for single in [false, true] {
            let unprepared = Model::new(&config, single, DType::F32);
            let off = Model::new(&config, single, DType::F32);
            let options = PrepareOptions::default().with_off("*").unwrap();
            prepare_fp8(&off, &options).unwrap();
            let prepared = Model::prepared(&config, single, DType::F32);
            let x = input(DType::F32);
            let want = unprepared.step(&x, &Default::default(), None);
            for name in RecipeName::ALL {
                let on = Autocast::new(name);
                let calibrating = on.clone().calibrating(true);
                for (case, model, guard) in [
                    ("unprepared", &unprepared, on.clone()),
                    ("off", &off, on),
                    ("calibrating", &prepared, calibrating),
                ] {
                    let case = format!("{case}, {name}, {operands:?}, single node {single}");
                    let got = model.step_in(&x, &Default::default(), Some(guard));
                    assert_steps(&case, &got, &want, &[], 0.);
                }
            }
        }
    }
}

#[test]
fn operands_are_those_of_the_configuration_in_a_guard_too() {
    let run = |operands, recipe| {
        let own = AttentionConfig::new(HEADS, 16).with_operands(operands);
        let model = Model::prepared(&config().with_attention(own), true, DType::F32);
        model.step(&input(DType::F32), &Default::default(), recipe)
    };
    for recipe in [None, Some("tensorwise")] {
        let [default, f32, bf16] = OPERANDS.map(|operands| run(operands, recipe));
        assert_steps("f32", &f32, &default, &[], 0.);
        assert_differ("bf16", &bf16.all["y"], &default.all["y"]);
    }
}
