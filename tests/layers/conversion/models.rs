//! Models of many structures, and how they show their layers.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::quantized_tensors;
use fp8::nn::{self, Linear, NamedTensor};
use fp8::{
    Fp8Layer, Fp8Module, PrepareOptions, Visitor, fp8_autocast, is_fp8_enabled, prepare_fp8,
};
use fp8_test_support::{assert_same, delayed, device, prepare};

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
    scale: NamedTensor,
    norm: nn::RmsNorm,
    #[fp8(skip)]
    dropout: f32,
    #[fp8(skip)]
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
            scale: NamedTensor::new("scale", vb.get(4, "scale").unwrap()),
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
        .map(|layer| layer.path.clone().unwrap())
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

/// The report lists remaining layers of candle_nn as far as they can be seen, and convolutions, converted or not.
#[test]
fn the_report_lists_convolutions_and_what_was_left_of_candle_nn() {
    #[derive(Fp8Module)]
    struct Classifier {
        conv: nn::Conv2d,
        left_over: candle_nn::Linear,
        left_over_conv: candle_nn::Conv1d,
        head: nn::Linear,
        #[fp8(skip)]
        _unseen: candle_nn::Linear,
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = Classifier {
        conv: nn::conv2d(3, 16, 3, Default::default(), vb.pp("conv")).unwrap(),
        left_over: candle_nn::linear(16, 32, vb.pp("left_over")).unwrap(),
        left_over_conv: candle_nn::conv1d(4, 8, 3, Default::default(), vb.pp("line")).unwrap(),
        head: nn::linear(128, 10, vb.pp("head")).unwrap(),
        _unseen: candle_nn::linear(2, 2, vb.pp("unseen")).unwrap(),
    };
    let expected = |conv: &str| {
        format!(
            "layer          [out, in]  result\n\
             conv            [16, 27]  {conv}\n\
             (no path)       [32, 16]  high precision: a layer of candle_nn, which has no FP8: use the one of `nn`\n\
             (no path)        [8, 12]  high precision: a layer of candle_nn, which has no FP8: use the one of `nn`\n\
             head           [10, 128]  fp8\n"
        )
    };
    let report = prepare_fp8(&model, &PrepareOptions::default()).unwrap();
    let text = format!("{}2 converted, 2 left in high precision", expected("fp8"));
    assert_eq!(report.to_string(), text);
    let kinds: Vec<_> = report.layers.iter().map(|layer| layer.kind).collect();
    let (linear, convolution) = (fp8::LayerKind::Linear, fp8::LayerKind::Convolution);
    assert_eq!(kinds, [convolution, linear, convolution, linear]);

    let options = PrepareOptions::default().with_convolutions(false);
    let report = prepare_fp8(&model, &options).unwrap();
    let off = "high precision: convolutions are off: PrepareOptions::with_convolutions(true) converts them";
    let text = format!("{}1 converted, 3 left in high precision", expected(off));
    let text = text.replace("fp8\n", "fp8 (was prepared before)\n");
    assert_eq!(report.to_string(), text);
    assert!(model.conv.fp8_state().is_none());
}

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
