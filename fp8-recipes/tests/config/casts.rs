//! Options of a recipe that each cast of a layer follows.

use candle_core::{DType, Device, Module, Tensor};
use fp8_recipes::config::*;
use fp8_recipes::nn::Linear;
use fp8_recipes::{Autocast, CastObserver, PrepareOptions, prepare_fp8, with_fp8};
use std::sync::{Arc, Mutex};

/// dequant_scale and codes of an input of these values.
fn cast_input(config: Fp8LinearConfig, x: &[f32]) -> (f32, Vec<u8>) {
    let weight = Tensor::ones((4, x.len()), DType::F32, &Device::Cpu).unwrap();
    let layer = Linear::new(weight, None).with_path("fc");
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let casts = Arc::new(Mutex::new(vec![]));
    let list = casts.clone();
    let observer = CastObserver::new(move |event| {
        if event.operand == Operand::Input {
            let scale = event.quantized.dequant_scale().flatten_all().unwrap();
            let codes = event.quantized.codes().flatten_all().unwrap();
            let cast = (
                scale.to_vec1::<f32>().unwrap(),
                codes.to_vec1::<u8>().unwrap(),
            );
            list.lock().unwrap().push(cast);
        }
    });
    let x = Tensor::from_slice(x, (1, x.len()), &Device::Cpu).unwrap();
    let autocast = Autocast::new(config).with_cast_observer(&observer);
    with_fp8(autocast, || layer.forward(&x)).unwrap();
    let mut casts = std::mem::take(&mut *casts.lock().unwrap());
    assert_eq!(casts.len(), 1);
    let (scale, codes) = casts.remove(0);
    assert_eq!(scale.len(), 1);
    (scale[0], codes)
}

fn recipe(name: RecipeName) -> Fp8LinearConfig {
    Fp8LinearConfig::from_recipe_name(name)
}

/// 448 in E4M3.
const MAX: u8 = 0x7E;

#[test]
fn an_amax_below_the_epsilon_counts_as_the_epsilon() {
    let current = recipe(RecipeName::Current);
    let small = [1e-6, -2.5e-7];
    let (scale, codes) = cast_input(current.clone(), &small);
    assert!((scale * 448. / 1e-6 - 1.).abs() < 1e-6, "{scale:e}");
    assert_eq!(codes[0], MAX);
    let current = current.with_amax_epsilon(0.5);
    let (scale, codes) = cast_input(current.clone(), &small);
    assert_eq!(scale, 0.5 / 448.);
    // 1e-6 of 0.5 is nothing.
    assert_eq!(codes, [0, 0x80]);
    // A larger amax does not change.
    let (scale, codes) = cast_input(current, &[1.75, 0.]);
    assert_eq!((scale, codes), (1.75 / 448., vec![MAX, 0]));
}

#[test]
fn scales_are_rounded_to_powers_of_two() {
    for name in [RecipeName::Current, RecipeName::Tensorwise] {
        let x = [3., -1.];
        let (exact, codes) = cast_input(recipe(name), &x);
        assert!((exact * 448. / 3. - 1.).abs() < 1e-6, "{name}: {exact:e}");
        assert_eq!(codes[0], MAX);
        let rounded = recipe(name).with_round_scales_to_power_of_two(true);
        let (scale, codes) = cast_input(rounded, &x);
        // 448 / 3 rounded down, so that nothing saturates.
        assert_eq!(scale, 1. / 128., "{name}");
        // 384 and -128.
        assert_eq!(codes, [0x7C, 0xF0], "{name}");
    }
}

#[test]
fn a_value_rounded_to_f16_first_may_have_another_code() {
    // Above the middle between 1 and 1.25 by less than f16 can show: then it is a tie, which goes to the even 1.
    let x = [1.125 + 2f32.powi(-12), 1.125 + 2f32.powi(-10)];
    let direct = recipe(RecipeName::Direct);
    let (scale, codes) = cast_input(direct.clone(), &x);
    assert_eq!((scale, codes), (1., vec![0x3D, 0x3D]));
    let (_, codes) = cast_input(direct.with_via_f16(true), &x);
    assert_eq!(codes, [0x3C, 0x3D]);
}
