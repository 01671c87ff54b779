//! Models of every shape, and how they show their layers.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::quantized_tensors;
use fp8::nn::{self, Linear, Parameter};
use fp8::{Fp8Layer, Fp8Module, Visitor, fp8_autocast, is_fp8_enabled};
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
    scale: Parameter,
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
