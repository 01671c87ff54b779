//! `prepare_fp8`, how models show their layers, the cast counter, `check_gradients` and the drop-in layers.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::recipes::checkpoint::quantized_tensors;
use fp8::recipes::config::{LayerFilter, RecipeName};
use fp8::recipes::nn::{self, Linear, Parameter};
use fp8::recipes::{
    Autocast, Fp8Layer, Fp8Module, Outcome, PrepareOptions, PrepareReport, Visitor,
    check_gradients, fp8_autocast, is_fp8_enabled, prepare_fp8,
};

#[path = "common/recipes.rs"]
mod common;
use common::{
    Layer, Mlp, assert_close, assert_differ, assert_same, assert_text, delayed, device, fill, flat,
    of, prepare, skipped_on_cuda, tensor, var,
};

/// Path and what became of it, `fp8` or the reason.
fn outcomes(report: &PrepareReport) -> Vec<(String, String)> {
    let text = |outcome: &Outcome| match outcome {
        Outcome::Converted(None) => "fp8".to_string(),
        Outcome::Converted(Some(note)) => format!("fp8: {note}"),
        Outcome::Skipped(reason) => reason.clone(),
    };
    report
        .layers
        .iter()
        .map(|l| (l.path.clone(), text(&l.outcome)))
        .collect()
}

#[track_caller]
fn assert_outcomes(case: &str, report: &PrepareReport, expected: &[(&str, &str)]) {
    let expected: Vec<_> = expected
        .iter()
        .map(|(path, text)| (path.to_string(), text.to_string()))
        .collect();
    assert_eq!(outcomes(report), expected, "{case}:\n{report}");
}

fn new_mlp(seed: u64) -> (VarMap, Mlp) {
    let vars = VarMap::new();
    let mlp = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, seed);
    (vars, mlp)
}

// ---- the report ------------------------------------------------------------------------------

#[test]
fn the_report_names_every_linear_layer_and_prints_as_a_table() {
    let (_vars, mlp) = new_mlp(1);
    let filter = LayerFilter::new().skip_paths(["down"]);
    let report = prepare_fp8(&mlp, &filter.into()).unwrap();
    assert_outcomes(
        "report",
        &report,
        &[("up", "fp8"), ("down", "path contains `down`")],
    );
    assert_eq!((report.converted(), report.skipped()), (1, 1));
    let up = report.get("up").unwrap();
    assert_eq!((up.out_features, up.in_features), (Mlp::HIDDEN, Mlp::IN));
    assert_eq!(report.get("sideways"), None);
    let expected = "\
layer      [out, in]  result
up          [20, 12]  fp8
down         [6, 20]  high precision: path contains `down`
1 converted, 1 left in high precision";
    assert_eq!(report.to_string(), expected);
    assert_eq!(
        PrepareReport::default().to_string().lines().count(),
        2,
        "an empty table prints"
    );
}

#[test]
fn filters_skip_and_say_why() {
    let min = LayerFilter::new().with_min_dims(8, 0);
    let multiple = LayerFilter::new().with_multiple_of(4);
    let custom = LayerFilter::new().with_custom(|path, n, k| path == "up" && n > k);
    let auto = LayerFilter::new().with_auto(RecipeName::Tensorwise);
    let up = (Mlp::HIDDEN, Mlp::IN);
    assert_eq!((up, Mlp::OUT), ((20, 12), 6), "the reasons below");
    for (case, filter, expected) in [
        ("default", LayerFilter::new(), ["fp8", "fp8"]),
        ("min", min, ["fp8", "N = 6 is below 8"]),
        (
            "multiple",
            multiple,
            ["fp8", "N = 6 is not a multiple of 4"],
        ),
        ("custom", custom, ["fp8", "custom filter"]),
        (
            "auto",
            auto,
            [
                "N = 20 is not a multiple of 16",
                "N = 6 is not a multiple of 16",
            ],
        ),
    ] {
        let (_vars, mlp) = new_mlp(2);
        let report = prepare_fp8(&mlp, &PrepareOptions::default().with_filter(filter)).unwrap();
        assert_outcomes(case, &report, &[("up", expected[0]), ("down", expected[1])]);
        let prepared = [&mlp.up, &mlp.down].map(|layer| layer.fp8_state().is_some());
        assert_eq!(
            prepared,
            expected.map(|text| text == "fp8"),
            "{case}: state"
        );
    }
}

#[test]
fn layers_not_prepared_stay_in_high_precision_inside_a_guard() {
    let (_vars, mlp) = new_mlp(3);
    prepare_fp8(&mlp, &LayerFilter::new().skip_paths(["down"]).into()).unwrap();
    let (x, h) = (tensor(4, &[3, Mlp::IN]), tensor(5, &[3, Mlp::HIDDEN]));
    let plain = |layer: &Linear, x: &Tensor| {
        let bias = layer.bias().cloned();
        candle_nn::Linear::new(layer.weight().unwrap(), bias)
            .forward(x)
            .unwrap()
    };
    for (name, recipe) in common::recipes() {
        let _guard = fp8_autocast(recipe).unwrap();
        let case = format!("{name}, down");
        assert_same(&case, &mlp.down.forward(&h).unwrap(), &plain(&mlp.down, &h));
        let case = format!("{name}, up");
        assert_differ(&case, &mlp.up.forward(&x).unwrap(), &plain(&mlp.up, &x));
    }
    assert_eq!(mlp.down.fp8_state().map(|s| s.path().to_string()), None);
}

#[test]
fn a_layer_skipped_later_gives_its_state_back() {
    let (_vars, mut mlp) = new_mlp(6);
    assert_eq!(prepare(&mut mlp).converted(), 2);
    let filter = LayerFilter::new().skip_paths(["down"]);
    let report = prepare_fp8(&mlp, &filter.into()).unwrap();
    let expected = [
        ("up", "fp8: was prepared before"),
        ("down", "path contains `down`"),
    ];
    assert_outcomes("second time", &report, &expected);
    assert!(
        mlp.down.fp8_state().is_none(),
        "the report says high precision"
    );
    assert!(mlp.up.fp8_state().is_some());
}

#[test]
fn preparing_twice_keeps_the_state() {
    let (_vars, mut mlp) = new_mlp(7);
    prepare(&mut mlp);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        mlp.forward(&tensor(8, &[3, Mlp::IN])).unwrap();
    }
    let before = [&mlp.up, &mlp.down].map(common::slots);
    let report = prepare(&mut mlp);
    let note = "fp8: was prepared before";
    assert_outcomes("second time", &report, &[("up", note), ("down", note)]);
    assert_eq!([&mlp.up, &mlp.down].map(common::slots), before);
    assert_ne!(before[0][0].quant_scale, 1., "there was a state to keep");
}

#[test]
fn the_history_length_of_fresh_state_is_an_option() {
    let (_vars, mlp) = new_mlp(9);
    let options = PrepareOptions {
        amax_history_len: 16,
        ..Default::default()
    };
    prepare_fp8(&mlp, &options).unwrap();
    for slot in common::slots(&mlp.up) {
        assert_eq!((slot.quant_scale, slot.history), (1., vec![0.; 16]));
    }
}

// ---- layers that cannot be converted ---------------------------------------------------------

#[test]
fn weights_with_nan_or_inf_are_reported_and_skipped() {
    for (bad, reason) in [
        (f32::NAN, "the weight holds 1 NaN and 0 Inf of 12 values"),
        (
            f32::INFINITY,
            "the weight holds 0 NaN and 1 Inf of 12 values",
        ),
        (
            f32::NEG_INFINITY,
            "the weight holds 0 NaN and 1 Inf of 12 values",
        ),
    ] {
        let mut weight = common::values(10, 12);
        weight[7] = bad;
        let layer = |weight: Tensor, path: &str| Linear::new(weight, None).with_path(path);
        let mut model = (
            layer(of(&weight, &[3, 4]), "bad"),
            layer(tensor(11, &[3, 4]), "good"),
        );
        let report = prepare(&mut model);
        assert_outcomes(
            &bad.to_string(),
            &report,
            &[("bad", reason), ("good", "fp8")],
        );
        let _guard = fp8_autocast(delayed(4)).unwrap();
        let x = tensor(12, &[2, 4]);
        let plain = candle_nn::Linear::new(model.0.weight().unwrap(), None);
        assert_same(
            "bad",
            &model.0.forward(&x).unwrap(),
            &plain.forward(&x).unwrap(),
        );
    }
}

#[test]
fn a_layer_without_a_path_or_with_a_strange_weight_is_skipped() {
    let no_path = Linear::new(tensor(13, &[3, 4]), None);
    let double = Linear::new(tensor(14, &[3, 4]).to_dtype(DType::F64).unwrap(), None);
    let mut model = (no_path, double.with_path("double"));
    let report = prepare(&mut model);
    let expected = [
        (
            "",
            "it has no path: build it from a VarBuilder or call with_path",
        ),
        ("double", "the weight is f64, not f32, bf16 or f16"),
    ];
    assert_outcomes("skipped", &report, &expected);
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let x = tensor(15, &[2, 4]);
    let plain = candle_nn::Linear::new(model.0.weight().unwrap(), None)
        .forward(&x)
        .unwrap();
    assert_same("no path", &model.0.forward(&x).unwrap(), &plain);
}

#[test]
fn half_precision_weights_are_converted() {
    for dtype in [DType::BF16, DType::F16] {
        let weight = tensor(16, &[3, 4]).to_dtype(dtype).unwrap();
        let mut layer = Linear::new(weight, None).with_path("fc");
        assert_eq!(prepare(&mut layer).converted(), 1, "{dtype:?}");
        let _guard = fp8_autocast(delayed(4)).unwrap();
        let y = layer
            .forward(&tensor(17, &[2, 4]).to_dtype(dtype).unwrap())
            .unwrap();
        assert_eq!(y.dtype(), dtype);
    }
}

#[test]
fn one_path_for_two_weights_converts_the_first_only() {
    let layer = |seed| Linear::new(tensor(seed, &[3, 4]), None).with_path("fc");
    let mut model = (layer(18), layer(19));
    let report = prepare(&mut model);
    let expected = [("fc", "fp8"), ("fc", "another layer has the same path")];
    assert_outcomes("two weights", &report, &expected);
    assert!(model.1.fp8_state().is_none());
    // The very same layer twice is one layer.
    let mut model = (layer(18), None::<Linear>);
    model.1 = Some(model.0.clone());
    let report = prepare(&mut model);
    let note = "fp8: shares its state with the same layer used before";
    assert_outcomes("one weight", &report, &[("fc", "fp8"), ("fc", note)]);
    let first = model.0.fp8_state().unwrap();
    let second = model.1.as_ref().unwrap().fp8_state().unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &second));
}

// ---- frozen and tied weights -----------------------------------------------------------------

#[test]
fn a_frozen_weight_computes_in_fp8_and_gets_no_gradient() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let x = var(20, &[2, 4]);
    for (name, recipe) in common::recipes() {
        let mut frozen = Linear::new(tensor(21, &[3, 4]), None).with_path("fc");
        assert_eq!(prepare(&mut frozen).converted(), 1);
        let mut trained = Layer::prepared("fc", 21, 3, 4).linear;
        trained = Linear::new(trained.weight().unwrap(), None).with_path("fc");
        prepare(&mut trained);
        let results = [&frozen, &trained].map(|layer| {
            let mut last = None;
            for _ in 0..3 {
                let guard = fp8_autocast(recipe.clone()).unwrap();
                let y = layer.forward(&x).unwrap();
                guard.close().unwrap();
                let grads = (&y * 3.).unwrap().sum_all().unwrap().backward().unwrap();
                let grad_weight = grads.get(&layer.weight().unwrap()).is_some();
                last = Some((y, grads.get(&x).unwrap().clone(), grad_weight));
            }
            last.unwrap()
        });
        let [
            (y, grad_x, grad_weight),
            (expected_y, expected_grad_x, trained_grad),
        ] = results;
        assert_same(&format!("{name}: y"), &y, &expected_y);
        assert_same(&format!("{name}: grad_x"), &grad_x, &expected_grad_x);
        assert_eq!(
            (grad_weight, trained_grad),
            (false, true),
            "{name}: grad_weight"
        );
        let plain = candle_nn::Linear::new(frozen.weight().unwrap(), None);
        assert_differ(name, &y, &plain.forward(&x).unwrap());
        // A frozen weight does not stay at the initial scale, and rolls once.
        if name.starts_with("delayed") {
            let weight = common::slot(&frozen, "weight");
            let amax = flat(&frozen.weight().unwrap())
                .into_iter()
                .fold(0f32, |a, x| a.max(x.abs()));
            assert_eq!(weight.quant_scale, 448. / amax, "{name}");
            assert_eq!(weight.history[1], 0., "{name}: one amax");
            assert_close(name, &y, &plain.forward(&x).unwrap(), 0.1);
        }
    }
}

/// A variable that the optimizer never sees is frozen in effect.
#[test]
fn a_variable_without_an_optimizer_behaves_as_a_frozen_weight() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    use fp8::recipes::optim::{AdamW, AdamWConfig};
    let (frozen, trained) = (
        Layer::prepared("a", 22, 4, 4),
        Layer::prepared("b", 24, 3, 4),
    );
    let named = vec![("b.weight".to_string(), trained.weight.clone())];
    let mut optimizer = AdamW::from_named(named, AdamWConfig::default()).unwrap();
    let before = frozen.weight.as_tensor().copy().unwrap();
    for _ in 0..3 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let h = frozen.linear.forward(&tensor(26, &[2, 4])).unwrap();
        let y = trained.linear.forward(&h).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
    }
    assert_same("frozen", frozen.weight.as_tensor(), &before);
    let [frozen, trained] = [frozen, trained].map(|layer| {
        layer
            .slot("weight")
            .history
            .iter()
            .filter(|a| **a > 0.)
            .count()
    });
    assert_eq!(
        (frozen, trained),
        (1, 3),
        "amaxes of the frozen and of the trained weight"
    );
}

#[test]
fn tied_weights_are_named_and_each_layer_has_its_own_state() {
    let weight = var(27, &[5, 4]);
    let layer = |path: &str| Linear::new(weight.as_tensor().clone(), None).with_path(path);
    let mut model = (layer("encoder.out"), layer("decoder.out"));
    let report = prepare(&mut model);
    let expected = [
        ("encoder.out", "fp8: weight tied with decoder.out.weight"),
        ("decoder.out", "fp8: weight tied with encoder.out.weight"),
    ];
    assert_outcomes("two linears", &report, &expected);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        model.0.forward(&of(&[2.; 4], &[1, 4])).unwrap();
        model.1.forward(&of(&[4.; 4], &[1, 4])).unwrap();
    }
    let inputs = [&model.0, &model.1].map(|layer| common::slot(layer, "input").history[0]);
    assert_eq!(inputs, [2., 4.], "inputs differ");
    let weights = [&model.0, &model.1].map(|layer| common::slot(layer, "weight"));
    assert_eq!(weights[0], weights[1], "the weight is one");
    // One gradient, from both uses.
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let x = tensor(28, &[2, 4]);
    let y = (model.0.forward(&x).unwrap() + model.1.forward(&x).unwrap()).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    let single = model
        .0
        .forward(&x)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let twice = (single.get(&weight).unwrap() * 2.).unwrap();
    assert_close("grad_weight", grads.get(&weight).unwrap(), &twice, 0.1);
}

/// An embedding whose rows are the weight of the last layer, both under one variable.
#[derive(Fp8Module)]
struct Tied {
    embed: nn::Embedding,
    fc: Linear,
    head: Linear,
}

#[test]
fn a_linear_tied_to_an_embedding_says_so() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let embed = nn::embedding(10, 4, vb.pp("embed")).unwrap();
    let head = Linear::new(embed.embeddings().clone(), None).with_path("head");
    let fc = nn::linear(4, 4, vb.pp("fc")).unwrap();
    let mut model = Tied { embed, fc, head };
    let report = prepare(&mut model);
    let expected = [
        ("fc", "fp8"),
        (
            "head",
            "its weight is `embed.weight` too, which stays in high precision",
        ),
    ];
    assert_outcomes("tied", &report, &expected);
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let ids = Tensor::new(&[1u32, 7], &device()).unwrap();
    let h = model
        .fc
        .forward(&model.embed.forward(&ids).unwrap())
        .unwrap();
    let loss = model
        .head
        .forward(&h)
        .unwrap()
        .sqr()
        .unwrap()
        .sum_all()
        .unwrap();
    let grads = loss.backward().unwrap();
    assert_eq!(check_gradients(&vars, &grads), Vec::<String>::new());
}

// ---- shapes of models ------------------------------------------------------------------------

#[derive(Fp8Module)]
struct Leaf {
    fc: Linear,
}

#[derive(Fp8Module)]
struct Many {
    list: Vec<Leaf>,
    maybe: Option<Leaf>,
    nothing: Option<Leaf>,
    boxed: Box<Leaf>,
    array: [Leaf; 2],
    pair: (Leaf, Box<dyn Fp8Module>),
    nested: Vec<Option<Box<Leaf>>>,
    scale: Parameter,
    norm: nn::RmsNorm,
    dropout: f32,
    name: &'static str,
}

impl Many {
    fn new(vb: &VarBuilder<'_>) -> Self {
        let leaf = |name: &str| Leaf {
            fc: nn::linear(4, 3, vb.pp(name).pp("fc")).unwrap(),
        };
        Self {
            list: vec![leaf("list.0"), leaf("list.1")],
            maybe: Some(leaf("maybe")),
            nothing: None,
            boxed: leaf("boxed").into(),
            array: [leaf("array.0"), leaf("array.1")],
            pair: (leaf("pair.0"), Box::new(leaf("pair.1"))),
            nested: vec![None, Some(leaf("nested.1").into())],
            scale: Parameter::new("scale", vb.get(4, "scale").unwrap()),
            norm: nn::rms_norm(4, 1e-6, vb.pp("norm")).unwrap(),
            dropout: 0.1,
            name: "many",
        }
    }
}

#[test]
fn fields_of_every_kind_are_visited_in_order_with_their_paths() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Many::new(&vb);
    let report = prepare(&mut model);
    let leaves = [
        "list.0", "list.1", "maybe", "boxed", "array.0", "array.1", "pair.0", "pair.1", "nested.1",
    ];
    let expected: Vec<_> = leaves.iter().map(|leaf| format!("{leaf}.fc")).collect();
    let paths: Vec<_> = report
        .layers
        .iter()
        .map(|layer| layer.path.clone())
        .collect();
    assert_eq!(paths, expected);
    assert_eq!(
        (report.converted(), model.dropout, model.name),
        (9, 0.1, "many")
    );
    assert!(model.nothing.is_none());

    #[derive(Default)]
    struct Names(Vec<String>);
    impl Visitor for Names {
        fn layer(&mut self, linear: &dyn Fp8Layer) {
            self.0.push(linear.path().unwrap().to_string());
        }
        fn tensor(&mut self, path: Option<&str>, _: &Tensor) {
            self.0.push(path.unwrap().to_string());
        }
    }
    let mut names = Names::default();
    model.visit(&mut names);
    let tensors = ["scale".to_string(), "norm.weight".to_string()];
    assert_eq!(names.0, [expected, tensors.to_vec()].concat(), "visit");
}

#[derive(Fp8Module)]
struct NoLinear {
    embed: nn::Embedding,
    norm: nn::LayerNorm,
}

#[derive(Fp8Module)]
struct Empty {}

#[test]
fn a_model_without_a_linear_layer_gives_an_empty_report() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = NoLinear {
        embed: nn::embedding(10, 4, vb.pp("embed")).unwrap(),
        norm: nn::layer_norm(4, 1e-5, vb.pp("norm")).unwrap(),
    };
    for report in [
        prepare(&mut model),
        prepare(&mut Empty {}),
        prepare(&mut Vec::<Linear>::new()),
    ] {
        assert_eq!(
            (report.layers.len(), report.converted(), report.skipped()),
            (0, 0, 0)
        );
        assert!(
            report
                .to_string()
                .ends_with("0 converted, 0 left in high precision"),
            "{report}"
        );
    }
    let ids = Tensor::new(&[1u32, 7], &device()).unwrap();
    let forward = || {
        model
            .norm
            .forward(&model.embed.forward(&ids).unwrap())
            .unwrap()
    };
    let plain = forward();
    let guard = fp8_autocast(delayed(4)).unwrap();
    assert!(is_fp8_enabled());
    assert_same("inside a guard", &forward(), &plain);
    guard.close().unwrap();
    assert_eq!(quantized_tensors(&model), 0);
}

// ---- the counter -----------------------------------------------------------------------------

#[test]
fn the_counter_tells_how_many_tensors_were_cast() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    // Per step: with a gradient for x, without one (a first layer), forward only.
    for (name, counts) in [
        ("tensorwise", [3, 3, 2]),
        ("rowwise", [6, 4, 2]),
        ("rowwise_with_gw_hp", [4, 2, 2]),
        ("delayed", [3, 3, 2]),
    ] {
        let recipe: fp8::recipes::Recipe = name.parse().unwrap();
        let with_grad = var(30, &[5, 8]);
        let without = tensor(30, &[5, 8]);
        for (case, x, backward, count) in [
            ("x tracked", with_grad.as_tensor(), true, counts[0]),
            ("x not tracked", &without, true, counts[1]),
            ("forward only", &without, false, counts[2]),
        ] {
            let case = format!("{name}, {case}");
            let layer = Layer::prepared("fc", 31, 4, 8);
            let counted = || quantized_tensors(&layer.linear);
            let step = |autocast: Option<Autocast>| {
                let guard = autocast.map(|autocast| fp8_autocast(autocast).unwrap());
                let y = layer.linear.forward(x).unwrap();
                drop(guard);
                if backward {
                    y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                }
            };
            for plain in [
                None,
                Some(Autocast::disabled()),
                Some(Autocast::new(recipe.clone()).calibrating(true)),
            ] {
                step(plain.clone());
                assert_eq!(counted(), 0, "{case}: high precision {plain:?}");
            }
            for steps in 1..=4 {
                step(Some(recipe.clone().into()));
                assert_eq!(counted(), steps * count, "{case}: after {steps} steps");
                // As an optimizer would.
                layer
                    .weight
                    .set(&(layer.weight.as_tensor() * 0.9).unwrap())
                    .unwrap();
            }
            let before = counted();
            step(Some(recipe.clone().into()));
            step(Some(recipe.clone().into()));
            let expected = 2 * count - 1;
            // The weight did not change in between: its forward cast is counted once.
            assert_eq!(counted() - before, expected, "{case}: two micro-batches");
        }
    }
}

#[test]
fn the_counter_of_a_model_sums_its_layers_and_counts_a_shared_one_once() {
    let (_vars, mut mlp) = new_mlp(32);
    prepare(&mut mlp);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        mlp.forward(&tensor(33, &[3, Mlp::IN])).unwrap();
    }
    assert_eq!(quantized_tensors(&mlp), 4);
    let shared = vec![mlp.up.clone(), mlp.up.clone()];
    assert_eq!(quantized_tensors(&shared), 2, "one layer in two places");
    assert_eq!(mlp.up.fp8_state().unwrap().quantized_tensors(), 2);
}

// ---- check_gradients -------------------------------------------------------------------------

#[test]
fn check_gradients_names_what_candles_norm_cuts_off_and_nothing_of_ours() {
    if skipped_on_cuda("candle-nn has no such operation there without its own cuda feature") {
        return;
    }
    let x = tensor(40, &[3, Mlp::IN]);
    for ours in [false, true] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
        let up = nn::linear(Mlp::IN, 8, vb.pp("up")).unwrap();
        let down = nn::linear(8, 4, vb.pp("down")).unwrap();
        let norm: Box<dyn Module> = if ours {
            Box::new(nn::rms_norm(8, 1e-6, vb.pp("norm")).unwrap())
        } else {
            Box::new(candle_nn::rms_norm(8, 1e-6, vb.pp("norm")).unwrap())
        };
        let mut layers = (up, down);
        prepare(&mut layers);
        for fp8 in [false, true] {
            let _guard = fp8_autocast(Autocast::new(delayed(4)).enabled(fp8)).unwrap();
            let y = layers
                .1
                .forward(&norm.forward(&layers.0.forward(&x).unwrap()).unwrap());
            let grads = y
                .unwrap()
                .sqr()
                .unwrap()
                .sum_all()
                .unwrap()
                .backward()
                .unwrap();
            let expected: &[&str] = if ours {
                &[]
            } else {
                &["norm.weight", "up.bias", "up.weight"]
            };
            assert_eq!(
                check_gradients(&vars, &grads),
                expected,
                "ours: {ours}, FP8: {fp8}"
            );
        }
    }
}

#[test]
fn check_gradients_is_empty_for_a_model_of_our_layers() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let embed = nn::embedding(10, 8, vb.pp("embed")).unwrap();
    let layer_norm = nn::layer_norm(8, 1e-5, vb.pp("layer_norm")).unwrap();
    let no_bias = nn::layer_norm_no_bias(8, 1e-5, vb.pp("no_bias")).unwrap();
    let rms_norm = nn::rms_norm(8, 1e-6, vb.pp("rms_norm")).unwrap();
    let mut fc = nn::linear(8, 8, vb.pp("fc")).unwrap();
    prepare(&mut fc);
    vb.get_with_hints_dtype(3, "counts", candle_nn::Init::Const(0.), DType::U32)
        .unwrap();
    let ids = Tensor::new(&[1u32, 7], &device()).unwrap();
    for (name, recipe) in common::recipes() {
        let _guard = fp8_autocast(recipe).unwrap();
        let h = layer_norm.forward(&embed.forward(&ids).unwrap()).unwrap();
        let h = rms_norm
            .forward(&no_bias.forward(&fc.forward(&h).unwrap()).unwrap())
            .unwrap();
        let grads = h
            .sqr()
            .unwrap()
            .mul(&h)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        assert_eq!(
            check_gradients(&vars, &grads),
            Vec::<String>::new(),
            "{name}"
        );
    }
}

// ---- drop-in layers --------------------------------------------------------------------------

#[test]
fn norms_and_embedding_give_candle_nns_values() {
    if skipped_on_cuda("candle-nn has no such operation there without its own cuda feature") {
        return;
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let (size, eps) = (33, 1e-5);
    let ours = nn::layer_norm(size, eps, vb.pp("layer_norm")).unwrap();
    let ours_no_bias = nn::layer_norm_no_bias(size, eps, vb.pp("no_bias")).unwrap();
    let ours_rms = nn::rms_norm(size, eps, vb.pp("rms")).unwrap();
    let ours_embed = nn::embedding(11, size, vb.pp("embed")).unwrap();
    let mut names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    let expected = [
        "embed.weight",
        "layer_norm.bias",
        "layer_norm.weight",
        "no_bias.weight",
        "rms.weight",
    ];
    assert_eq!(names, expected, "candle-nn's names");
    fill(&vars, 41);
    // The same variables, by candle-nn's own constructors.
    let stock = candle_nn::layer_norm(size, eps, vb.pp("layer_norm")).unwrap();
    let stock_no_bias = candle_nn::layer_norm_no_bias(size, eps, vb.pp("no_bias")).unwrap();
    let stock_rms = candle_nn::rms_norm(size, eps, vb.pp("rms")).unwrap();
    let stock_embed = candle_nn::embedding(11, size, vb.pp("embed")).unwrap();
    for dims in [vec![size], vec![4, size], vec![2, 3, size]] {
        let x = ((tensor(42, &dims) * 5.).unwrap() + 2.).unwrap();
        // candle-nn's norms take no 1-D input.
        let stock_x = if dims.len() == 1 {
            x.unsqueeze(0).unwrap()
        } else {
            x.clone()
        };
        let pairs: [(&str, &dyn Module, &dyn Module); 3] = [
            ("layer_norm", &ours, &stock),
            ("layer_norm_no_bias", &ours_no_bias, &stock_no_bias),
            ("rms_norm", &ours_rms, &stock_rms),
        ];
        for (name, ours, stock) in pairs {
            let expected = stock
                .forward(&stock_x)
                .unwrap()
                .reshape(dims.as_slice())
                .unwrap();
            assert_close(
                &format!("{name} {dims:?}"),
                &ours.forward(&x).unwrap(),
                &expected,
                2e-6,
            );
        }
    }
    for ids in [
        Tensor::new(&[3u32, 0, 10], &device()),
        Tensor::new(&[[3u32, 0], [10, 3]], &device()),
    ] {
        let ids = ids.unwrap();
        let (got, expected) = (ours_embed.forward(&ids), stock_embed.forward(&ids));
        assert_same("embedding", &got.unwrap(), &expected.unwrap());
    }
    assert_eq!(
        (ours_embed.hidden_size(), ours_embed.path()),
        (size, Some("embed"))
    );
    assert!(
        ours_embed
            .forward(&Tensor::new(&[11u32], &device()).unwrap())
            .is_err(),
        "out of range"
    );
}

#[test]
fn the_constructors_of_linear_are_candle_nns() {
    let (vars, stock_vars) = (VarMap::new(), VarMap::new());
    for (map, ours) in [(&vars, true), (&stock_vars, false)] {
        let vb = VarBuilder::from_varmap(map, DType::F32, &device());
        if ours {
            nn::linear(4, 3, vb.pp("a")).unwrap();
            nn::linear_no_bias(4, 3, vb.pp("b")).unwrap();
            nn::linear_b(4, 3, true, vb.pp("c")).unwrap();
            let root = nn::linear_b(4, 3, false, vb.clone()).unwrap();
            assert_eq!(root.path(), Some(""), "at the root");
            let deep = nn::linear(4, 3, vb.pp("x").pp(0).pp("fc")).unwrap();
            assert_eq!(deep.path(), Some("x.0.fc"));
        } else {
            candle_nn::linear(4, 3, vb.pp("a")).unwrap();
            candle_nn::linear_no_bias(4, 3, vb.pp("b")).unwrap();
            candle_nn::linear_b(4, 3, true, vb.pp("c")).unwrap();
            candle_nn::linear_b(4, 3, false, vb.clone()).unwrap();
            candle_nn::linear(4, 3, vb.pp("x").pp(0).pp("fc")).unwrap();
        }
    }
    let shapes = |vars: &VarMap| {
        let vars = vars.data().lock().unwrap();
        let mut all: Vec<_> = vars
            .iter()
            .map(|(n, v)| (n.clone(), v.dims().to_vec()))
            .collect();
        all.sort();
        all
    };
    assert_eq!(shapes(&vars), shapes(&stock_vars));
    // The bounds of candle-nn's initialization.
    let vars = vars.data().lock().unwrap();
    assert!(
        flat(vars["a.bias"].as_tensor())
            .iter()
            .all(|b| b.abs() <= 0.5),
        "bias bound"
    );
    assert!(
        flat(vars["a.weight"].as_tensor()).iter().any(|w| *w != 0.),
        "weight not zero"
    );
}

/// `VarBuilder::zeros` says that it holds every name.
#[test]
fn a_layer_can_be_built_from_zeros() {
    for (in_dim, out_dim, bias) in [(4, 3, true), (4, 3, false)] {
        let vb = VarBuilder::zeros(DType::F32, &device());
        let layer = nn::linear_b(in_dim, out_dim, bias, vb.pp("fc")).unwrap();
        assert_eq!(layer.features(), (out_dim, in_dim));
        assert!(layer.static_weight().is_none(), "not an FP8 weight");
        let y = layer.forward(&tensor(50, &[2, in_dim])).unwrap();
        assert_eq!(flat(&y), vec![0.; 2 * out_dim]);
    }
}

#[test]
fn a_weight_that_happens_to_be_exact_in_fp8_is_no_fp8_weight() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    nn::linear_no_bias(4, 4, vb.pp("identity")).unwrap();
    let identity = Tensor::eye(4, DType::F32, &device()).unwrap();
    vars.data().lock().unwrap()["identity.weight"]
        .set(&identity)
        .unwrap();
    let layer = nn::linear_no_bias(4, 4, vb.pp("identity")).unwrap();
    assert_same("identity", &layer.weight().unwrap(), &identity);
}

#[test]
fn errors_of_a_layer_name_it() {
    let (_vars, mut mlp) = new_mlp(51);
    prepare(&mut mlp);
    let error = mlp.forward(&tensor(52, &[2, 5])).unwrap_err();
    assert_text("width", error, &["`up`", "5 features", "expected 12"]);
}
