//! Activations that modules keep in FP8: what the option changes, and what it leaves.

use crate::support::*;
use candle_core::{DType, Var};
use fp8_core::Format;
use fp8_recipes::checkpoint::{TrainingMeta, fp8_state, resume_training, save_training};
use fp8_recipes::config::{
    AttentionProducts, Fp8LinearConfig, KeptActivations, Recipe, RecipeName,
};
use fp8_recipes::nn::ops::Activation;
use fp8_recipes::nn::{AttentionConfig, LayerInputs, TransformerConfig, checkpoint};
use fp8_recipes::optim::NoOptimizer;
use fp8_recipes::{Autocast, end_step, fp8_autocast};
use fp8_test_support::flat64;
use std::sync::Arc;

fn recipe(name: &str, kept: KeptActivations) -> Recipe {
    let name: RecipeName = name.parse().unwrap();
    Fp8LinearConfig::from_recipe_name(name)
        .with_kept_activations(kept)
        .into()
}

/// The second of two steps, so that delayed scales count.
fn second_step(model: &Model, dtype: DType, name: &str, kept: KeptActivations) -> Step {
    second_step_in(model, dtype, recipe(name, kept))
}

fn second_step_in(model: &Model, dtype: DType, recipe: Recipe) -> Step {
    let step = || {
        let autocast = Autocast::new(recipe.clone());
        model.step_in(&input(dtype), &LayerInputs::default(), Some(autocast))
    };
    step();
    step()
}

/// The Euclidean norm of `a - b`, as a share of that of `b`.
fn far(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let far = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    far / norm(&mut b.iter().copied())
}

/// How far gradients may move: by the errors of what is kept, and of casts that see other values because of them. A value on its way back is
/// rounded at most 8 times to E4M3 (the inputs of a norm and an activation, q, k and v, and codes that are made again) and cast 4 times to
/// E5M2, once in either run. The mean square of a rounding to `m` bits is `2^(-2 m) / 24` of that of the values; see
/// `fp8_test_support::rounding::least_sqnr`.
fn bound() -> f64 {
    let share = |format: Format| 2f64.powi(-2 * format.mantissa_bits() as i32) / 24.;
    (8. * share(Format::E4M3) + 2. * 4. * share(Format::E5M2)).sqrt()
}

/// [`bound`] of a gradient of so many values: the norm of independent errors varies by `1 / sqrt(2 n)` of itself, and three times that is
/// allowed.
fn bound_of(values: usize) -> f64 {
    bound() * (1. + 3. / (2. * values as f64).sqrt())
}

#[test]
fn results_and_forward_state_stay_and_gradients_move_by_roundings() {
    let silu = config().with_hidden_act(Activation::SwiGlu);
    for dtype in [DType::F32, DType::BF16] {
        for config in [config(), silu.clone()] {
            for (recipe, recomputes) in RECIPES.iter().flat_map(|r| [(r, false), (r, true)]) {
                let heads = AttentionConfig::new(HEADS, HIDDEN / HEADS).with_causal(true);
                let config = config
                    .clone()
                    .with_attention(heads.with_operands(DType::BF16))
                    .with_recomputation(recomputes);
                let case = format!("{recipe}, {dtype:?}, recomputation {recomputes}");
                let run = |kept| {
                    let model = Model::prepared(&config, true, dtype);
                    second_step(&model, dtype, recipe, kept)
                };
                let (coded, exact) = (
                    run(KeptActivations::Fp8 { group_size: 32 }),
                    run(KeptActivations::HighPrecision),
                );
                assert_eq!(flat64(&coded.all["y"]), flat64(&exact.all["y"]), "{case}");
                let kept = |step: &Step| step.summary.as_ref().unwrap().kept_bytes();
                // A norm's input, q, k and v with a scale of 4 bytes for 32 codes; the rest depends on the recipe.
                let least = 4 * BATCH * TOKENS * HIDDEN * 9 / 8;
                assert!(kept(&coded) >= least as u64, "{case}: {}", kept(&coded));
                assert_eq!(kept(&exact), 0, "{case}");
                let mut moved = 0;
                assert_eq!(coded.all.len(), exact.all.len());
                for (name, grad) in &coded.all {
                    // The gradient of the keys' bias is 0 but for roundings.
                    if name.contains("k_proj.bias") {
                        continue;
                    }
                    let far = far(&flat64(grad), &flat64(&exact.all[name]));
                    let bound = bound_of(grad.elem_count());
                    assert!(far <= bound, "{case}, {name}: {far} of {bound}");
                    moved += usize::from(far > 0.);
                }
                assert!(moved > 5, "{case}: {moved}");
            }
        }
    }
}

/// Attention keeps the codes that its FP8 products read, with the option and without; q, k and v of its other products are rounded
/// by the option.
#[test]
fn products_of_attention_in_fp8_keep_their_own_codes() {
    let all = AttentionProducts::all();
    let run = |products, kept| {
        let model = Model::prepared(&config(), true, DType::F32);
        let recipe = recipe("rowwise", kept).with_attention(products);
        second_step_in(&model, DType::F32, recipe)
    };
    let bytes = |step: &Step| step.summary.as_ref().unwrap().kept_bytes();
    let groups = KeptActivations::Fp8 { group_size: 32 };
    let of_values = bytes(&run(AttentionProducts::none(), groups));
    // A tensor of q, k or v: a code for each value, and a scale of 4 bytes for 32 of them.
    let tensor = (BATCH * TOKENS * HIDDEN * 9 / 8) as u64;
    for (products, own) in [
        (all, 3),
        // Values of q and k for their gradients; of both for the scores; of v for the gradient of the probabilities.
        (all.with_grad_inputs(false), 1),
        (all.with_scores(false), 1),
        (all.with_grad_probabilities(false), 2),
    ] {
        let (coded, exact) = (
            run(products, groups),
            run(products, KeptActivations::HighPrecision),
        );
        assert_eq!(bytes(&exact), 0, "{products}");
        assert_eq!(bytes(&coded), of_values - own * tensor, "{products}");
        assert_eq!(
            flat64(&coded.all["y"]),
            flat64(&exact.all["y"]),
            "{products}"
        );
        for (name, grad) in &coded.all {
            // The gradient of the keys' bias is 0 but for roundings.
            if !name.contains("k_proj.bias") {
                let far = far(&flat64(grad), &flat64(&exact.all[name]));
                assert!(far <= bound(), "{products}, {name}: {far} of {}", bound());
            }
        }
    }
}

/// A function that is computed again gives the gradients that it gives without a checkpoint.
#[test]
fn a_checkpoint_changes_no_bit() {
    for name in ["delayed", "rowwise"] {
        for recomputes in [false, true] {
            let config = config().with_recomputation(recomputes);
            let run = |checkpointed: bool| {
                let model = Model::prepared(&config, true, DType::F32);
                let x = Var::from_tensor(&input(DType::F32)).unwrap();
                let guard = fp8_autocast(recipe(name, KeptActivations::fp8())).unwrap();
                let layer = model.layer.clone();
                let f = move |x: &candle_core::Tensor| layer.forward(x, &LayerInputs::default());
                let y = match checkpointed {
                    true => checkpoint(f, &x).unwrap(),
                    false => f(&x).unwrap(),
                };
                let step = model.backward(&x, y);
                guard.close().unwrap();
                end_step().unwrap();
                (step, format!("{:?}", fp8_state(&model).unwrap()))
            };
            let (again, plain) = (run(true), run(false));
            assert_steps(name, &again.0, &plain.0, &[], 0.);
            assert_eq!(again.1, plain.1);
        }
    }
}

#[test]
fn a_resumed_run_goes_on_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("training.safetensors");
    let kept = recipe("delayed", KeptActivations::fp8());
    let model = || Model::prepared(&config().with_recomputation(true), true, DType::F32);
    let (saved, other) = (model(), model());
    second_step(&saved, DType::F32, "delayed", KeptActivations::fp8());
    let meta = TrainingMeta {
        step: 2,
        recipe: Some(kept.clone()),
        random: Default::default(),
        extra: Default::default(),
    };
    save_training(&path, &saved, &saved.vars, &NoOptimizer, &meta).unwrap();
    resume_training(&path, &other, &other.vars, &mut NoOptimizer, Some(&kept)).unwrap();
    let step = |model: &Model| second_step(model, DType::F32, "delayed", KeptActivations::fp8());
    assert_steps("resumed", &step(&saved), &step(&other), &[], 0.);
    let state = |model: &Model| format!("{:?}", fp8_state(model).unwrap());
    assert_eq!(state(&saved), state(&other));
}

/// candle's graph keeps the tensors of layers that are called one by one, so the option has no effect there, and the summary says so.
#[test]
fn layers_called_one_by_one_keep_their_values() {
    let run = |kept| {
        let model = Model::prepared(&config(), false, DType::F32);
        second_step(&model, DType::F32, "delayed", kept)
    };
    let (coded, exact) = (
        run(KeptActivations::fp8()),
        run(KeptActivations::HighPrecision),
    );
    assert_steps("one by one", &coded, &exact, &[], 0.);
    assert_eq!(coded.summary.unwrap().kept_bytes(), 0);
}

/// A disabled guard computes in high precision, with nothing rounded.
#[test]
fn a_disabled_guard_keeps_values() {
    let run = |autocast| {
        let model = Model::prepared(&config(), true, DType::F32);
        model.step_in(&input(DType::F32), &LayerInputs::default(), autocast)
    };
    let off = Autocast::new(recipe("delayed", KeptActivations::fp8())).enabled(false);
    let (off, none) = (run(Some(off)), run(None));
    assert_steps("disabled", &off, &none, &[], 0.);
    assert_eq!(off.summary.unwrap().kept_bytes(), 0);
}

/// Steps on several threads at once, each of which keeps codes.
#[test]
fn threads_give_the_same_gradients() {
    let run = || {
        let model = Model::prepared(&config(), true, DType::F32);
        second_step(&model, DType::F32, "delayed", KeptActivations::fp8())
    };
    let first = Arc::new(run());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let first = first.clone();
            scope.spawn(move || assert_steps("thread", &run(), &first, &[], 0.));
        }
    });
}

/// Post-norm layers read the block's own input in their projections; the residual is a norm's result.
#[test]
fn modules_of_other_forms_keep_codes() {
    use fp8_recipes::nn::NormPlacement;
    let forms: [TransformerConfig; 3] = [
        config().with_norm_placement(NormPlacement::Post),
        config().with_fused_qkv(true),
        config()
            .with_hidden_act(Activation::SwiGlu)
            .with_fused_gate_up(true),
    ];
    for form in forms {
        for recomputes in [false, true] {
            let form = form.clone().with_recomputation(recomputes);
            let run = |kept| {
                let model = Model::prepared(&form, true, DType::F32);
                second_step(&model, DType::F32, "rowwise", kept)
            };
            let (coded, exact) = (
                run(KeptActivations::fp8()),
                run(KeptActivations::HighPrecision),
            );
            assert_eq!(flat64(&coded.all["y"]), flat64(&exact.all["y"]));
            assert!(coded.summary.unwrap().kept_bytes() > 0);
            let far = far(&flat64(&coded.all["x"]), &flat64(&exact.all["x"]));
            assert!(far > 0. && far <= bound(), "{far}");
        }
    }
}
