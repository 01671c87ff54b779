//! What a model shows: the derive on every kind of type, containers, and the leaves of candle_nn.

use candle_core::{DType, Device, Module, Tensor, TensorId};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{self, Linear, NamedTensor};
use fp8_recipes::{Fp8Layer, Fp8Module, PrepareOptions, Visitor, fp8_autocast, prepare_fp8};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

/// Paths of layers and names of tensors, in the order in which they are shown; `?` for a tensor without a name.
fn shown(model: &impl Fp8Module) -> Vec<String> {
    #[derive(Default)]
    struct Names(Vec<String>);
    impl Visitor for Names {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            self.0.push(layer.path().unwrap_or("?").to_string());
        }
        fn tensor(&mut self, path: Option<&str>, _: &Tensor) {
            self.0.push(path.unwrap_or("?").to_string());
        }
    }
    let mut names = Names::default();
    model.visit(&mut names);
    names.0
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

fn layer(path: &str) -> Linear {
    Linear::new(ones(&[2, 2]), None).with_path(path)
}

// ---- the derive ------------------------------------------------------------------------------

#[derive(Fp8Module)]
struct Named {
    z: Linear,
    a: Linear,
    r#type: f32,
    #[fp8(skip)]
    activation: fn(f32) -> f32,
    #[fp8(skip)]
    hidden: Linear,
}

#[derive(Fp8Module)]
struct Tuple(Linear, #[fp8(skip)] Box<dyn Fn()>, Linear, usize);

#[derive(Fp8Module)]
struct Unit;

#[derive(Fp8Module)]
struct Empty {}

#[derive(Fp8Module)]
#[allow(dead_code)]
enum Never {}

#[derive(Fp8Module)]
enum Mixer {
    Attention {
        query: Linear,
        heads: usize,
    },
    Pair(Linear, #[fp8(skip)] NotVisited, Linear),
    #[fp8(skip)]
    Closure(Box<dyn Fn()>),
    Nothing,
}

struct NotVisited;

#[derive(Fp8Module)]
struct Generic<'a, T, U, V: ?Sized, const N: usize>
where
    T: Clone,
{
    layers: [T; N],
    borrowed: &'a T,
    #[fp8(skip)]
    other: U,
    marker: PhantomData<V>,
    name: &'a str,
}

/// Recursion and a name that the derive's own could meet.
#[derive(Fp8Module)]
struct Tree {
    visitor: Linear,
    children: Vec<Tree>,
}

macro_rules! declared_by_a_macro {
    ($name:ident, $field:ty) => {
        #[derive(Fp8Module)]
        struct $name {
            layer: $field,
        }
    };
}
declared_by_a_macro!(Declared, Linear);

#[test]
fn the_derive_shows_all_fields_but_those_skipped_in_their_order() {
    let named = Named {
        z: layer("z"),
        a: layer("a"),
        r#type: 1.,
        activation: |x| x,
        hidden: layer("hidden"),
    };
    assert_eq!(shown(&named), ["z", "a"]);
    assert_eq!((named.activation)(named.r#type), 1.);
    assert_eq!(named.hidden.path(), Some("hidden"));
    let tuple = Tuple(layer("0"), Box::new(|| ()), layer("2"), 3);
    (tuple.1)();
    assert_eq!((shown(&tuple), tuple.3), (vec!["0".into(), "2".into()], 3));
    assert!(shown(&Unit).is_empty() && shown(&Empty {}).is_empty());
    assert!(shown(&None::<Never>).is_empty());
    for (mixer, expected) in [
        (
            Mixer::Attention {
                query: layer("q"),
                heads: 2,
            },
            &["q"][..],
        ),
        (Mixer::Pair(layer("a"), NotVisited, layer("c")), &["a", "c"]),
        (Mixer::Closure(Box::new(|| ())), &[]),
        (Mixer::Nothing, &[]),
    ] {
        assert_eq!(shown(&mixer), expected);
        match mixer {
            Mixer::Attention { heads, .. } => assert_eq!(heads, 2),
            Mixer::Closure(f) => f(),
            Mixer::Pair(_, NotVisited, _) | Mixer::Nothing => {}
        }
    }
    let inner = layer("inner");
    let generic = Generic::<_, _, str, 2> {
        layers: [layer("0"), layer("1")],
        borrowed: &inner,
        other: NotVisited,
        marker: PhantomData,
        name: "generic",
    };
    let NotVisited = generic.other;
    let _ = (generic.marker, generic.name);
    assert_eq!(shown(&generic), ["0", "1", "inner"]);
    let tree = Tree {
        visitor: layer("root"),
        children: vec![Tree {
            visitor: layer("leaf"),
            children: vec![],
        }],
    };
    assert_eq!(shown(&tree), ["root", "leaf"]);
    let declared = Declared {
        layer: layer("declared"),
    };
    assert_eq!(shown(&declared), ["declared"]);
}

// ---- containers and leaves -------------------------------------------------------------------

#[test]
fn containers_show_what_they_hold() {
    let l = layer;
    let maps = (
        HashMap::from([(10, l("10")), (9, l("9")), (2, l("2"))]),
        BTreeMap::from([("b", l("b")), ("a", l("a"))]),
    );
    assert_eq!(shown(&maps), ["2", "9", "10", "a", "b"]);
    let set = OnceLock::new();
    assert!(shown(&set).is_empty());
    set.set(l("once")).unwrap();
    let all = (
        (vec![l("vec")], VecDeque::from([l("deque")]), [l("array")]),
        (Some(l("some")), None::<Linear>, Box::new(l("box"))),
        (
            Rc::new(l("rc")),
            Arc::new(l("arc")),
            RefCell::new(l("cell")),
        ),
        (Mutex::new(l("mutex")), RwLock::new(l("rwlock")), set),
        (l("1"), l("2"), l("3"), l("4"), l("5"), l("6")),
        (
            Arc::new(vec![l("slice")]).as_slice().to_vec(),
            (l("single"),),
        ),
    );
    let expected = [
        "vec", "deque", "array", "some", "box", "rc", "arc", "cell", "mutex", "rwlock", "once",
        "1", "2", "3", "4", "5", "6", "slice", "single",
    ];
    assert_eq!(shown(&all), expected);
    let objects: Vec<Box<dyn Fp8Module>> = vec![Box::new(l("a")), Box::new(Unit)];
    assert_eq!(shown(&objects), ["a"]);
}

#[test]
fn shared_layers_can_be_prepared() {
    // As models that share a layer between threads or branches hold it.
    let shared = Arc::new(layer("shared"));
    let model = (
        shared.clone(),
        shared.clone(),
        Arc::new(Mutex::new(layer("locked"))),
    );
    let report = prepare_fp8(&model, &PrepareOptions::default()).unwrap();
    assert_eq!(report.converted(), 3, "{report}");
    assert!(shared.fp8_state().is_some());
    let casts = shared.fp8_state().unwrap();
    let guard = fp8_autocast("tensorwise".parse::<fp8_recipes::Recipe>().unwrap()).unwrap();
    shared.forward(&ones(&[3, 2])).unwrap();
    guard.close().unwrap();
    assert_eq!(casts.quantized_tensors(), 2);
    // A clone is the same layer, one with another path is not.
    let clone = Linear::clone(&shared);
    assert!(Arc::ptr_eq(&clone.fp8_state().unwrap(), &casts));
    let other = clone.clone().with_path("other");
    assert!(other.fp8_state().is_none());
    prepare_fp8(&other, &PrepareOptions::default()).unwrap();
    assert!(Arc::ptr_eq(&clone.fp8_state().unwrap(), &casts));
    assert_eq!(other.fp8_state().unwrap().path(), "other");
}

#[test]
fn layers_of_the_twin_know_their_names_and_candle_nns_do_not() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (c1, c2, t1, t2) = Default::default();
    let model = (
        (
            nn::conv1d(2, 3, 1, c1, vb.pp("c1")).unwrap(),
            nn::conv2d_no_bias(2, 3, 1, c2, vb.pp("c2")).unwrap(),
            nn::conv_transpose1d(2, 3, 1, t1, vb.pp("t1")).unwrap(),
            nn::conv_transpose2d_no_bias(2, 3, 1, t2, vb.pp("t2")).unwrap(),
        ),
        nn::group_norm(1, 2, 1e-5, vb.pp("group")).unwrap(),
        nn::lstm(2, 3, Default::default(), vb.pp("lstm")).unwrap(),
        nn::gru(2, 3, nn::rnn::GRUConfig::default_no_bias(), vb.pp("gru")).unwrap(),
        nn::embedding(4, 2, vb.pp("embed")).unwrap(),
        NamedTensor::new("gain", vb.get(2, "gain").unwrap()),
    );
    let mut names = shown(&model);
    names.sort();
    let mut expected: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
    // Convolutions are layers, shown whole.
    for name in &mut expected {
        if let Some((layer @ ("c1" | "c2" | "t1" | "t2"), _)) = name.split_once('.') {
            *name = layer.to_string();
        }
    }
    expected.sort();
    expected.dedup();
    assert_eq!(names, expected);
    // The tensors are the variables themselves.
    struct Ids(Vec<TensorId>);
    impl Visitor for Ids {
        fn tensor(&mut self, _: Option<&str>, tensor: &Tensor) {
            self.0.push(tensor.id());
        }
    }
    let mut ids = Ids(vec![]);
    model.visit(&mut ids);
    let vars = vars.data().lock().unwrap();
    assert!(vars.values().all(|var| ids.0.contains(&var.id())));

    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (c1, c2) = Default::default();
    let stock = (
        (
            candle_nn::linear(2, 3, vb.pp("l")).unwrap(),
            candle_nn::layer_norm(2, 1e-5, vb.pp("n")).unwrap(),
            candle_nn::rms_norm(2, 1e-5, vb.pp("r")).unwrap(),
            candle_nn::embedding(2, 3, vb.pp("e")).unwrap(),
        ),
        (
            candle_nn::conv1d(2, 3, 1, c1, vb.pp("c1")).unwrap(),
            candle_nn::conv2d_no_bias(2, 3, 1, c2, vb.pp("c2")).unwrap(),
            candle_nn::batch_norm(2, 1e-5, vb.pp("b")).unwrap(),
            candle_nn::prelu(None, vb.pp("p")).unwrap(),
        ),
        vb.get(2, "bare").unwrap(),
        candle_core::Var::from_tensor(&ones(&[1])).unwrap(),
    );
    // Every tensor of the VarMap, and the variable that is not in it.
    let count = vars.data().lock().unwrap().len() + 1;
    assert_eq!(shown(&stock), vec!["?"; count]);
}

#[test]
fn what_holds_no_parameters_shows_nothing() {
    let leaves = (
        ((), true, 'a', 1u8, -1i64, 0.5f64),
        ("text", String::new(), DType::F32, Device::Cpu),
        (
            tracing::Span::none(),
            nn::Activation::Gelu,
            nn::Dropout::new(0.1),
        ),
        (nn::Conv1dConfig::default(), nn::Conv2dConfig::default()),
        (
            nn::LayerNormConfig::default(),
            nn::BatchNormConfig::default(),
        ),
        (
            nn::func(|x| Ok(x.clone())),
            nn::kv_cache::KvCache::new(2, 4),
        ),
    );
    assert!(shown(&leaves).is_empty());
}
