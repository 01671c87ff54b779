//! Training of linear layers in parts: ranks clip and skip steps together, and get what one rank gets.

use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use fp8::nn::{Linear, LinearAxes, ParallelLinear};
use fp8::optim::{DataParallel, DataParallelOptions, NamedOptimizer, Sgd, SgdConfig};
use fp8::ranks::{DeviceMesh, ProcessGroup, threads};
use fp8_test_support::{flat, tensor};

const STEPS: u64 = 3;
const TOKENS: usize = 8;
const IN: usize = 16;
const HIDDEN: usize = 32;
const OUT: usize = 24;
const NAMES: [&str; 4] = ["up.weight", "up.bias", "down.weight", "down.bias"];

fn config() -> SgdConfig {
    SgdConfig::default()
        .with_lr(0.1)
        .with_momentum(0.9)
        .with_max_grad_norm(0.5)
}

fn bias(seed: u64, len: usize) -> Tensor {
    tensor(seed, &[1, len]).flatten_all().unwrap()
}

/// The variables of an MLP, in the order of [`NAMES`].
fn whole() -> [Tensor; 4] {
    [
        tensor(1, &[HIDDEN, IN]),
        bias(2, HIDDEN),
        tensor(3, &[OUT, HIDDEN]),
        bias(4, OUT),
    ]
}

fn named(vars: &[Var; 4]) -> Vec<(String, Var)> {
    let names = NAMES.iter().map(|name| name.to_string());
    names.zip(vars.iter().cloned()).collect()
}

/// Variables after the steps, and the factors by which gradients were clipped.
struct Trained {
    vars: Vec<Tensor>,
    clips: Vec<f64>,
}

fn train(
    vars: &[Var; 4],
    mut optimizer: Sgd,
    forward: impl Fn(&Tensor) -> fp8::Result<Tensor>,
) -> fp8::Result<Trained> {
    let mut clips = vec![];
    for step in 0..STEPS {
        let loss = forward(&tensor(10 + step, &[TOKENS, IN]))?;
        let grads = fp8::backward(&loss.sqr()?.sum_all()?)?;
        clips.push(optimizer.apply(&grads)?.clip_coefficient()?);
    }
    let vars = vars.iter().map(|var| var.as_detached_tensor()).collect();
    Ok(Trained { vars, clips })
}

fn alone() -> fp8::Result<Trained> {
    let vars = whole().map(|x| Var::from_tensor(&x).unwrap());
    let [w1, b1, w2, b2] = vars.each_ref().map(|var| var.as_tensor().clone());
    let (up, down) = (Linear::new(w1, Some(b1)), Linear::new(w2, Some(b2)));
    let optimizer = Sgd::from_named(named(&vars), config())?;
    train(&vars, optimizer, |x| {
        down.try_forward(&up.try_forward(x)?.relu()?)
    })
}

/// A column parallel layer and a row parallel one.
struct Mlp {
    mesh: DeviceMesh,
    axes: [LinearAxes; 2],
    vars: [Var; 4],
    up: ParallelLinear,
    down: ParallelLinear,
}

impl Mlp {
    fn new(group: &ProcessGroup) -> fp8::Result<Self> {
        let mesh = DeviceMesh::new(group, &[("model", 2)])?;
        let axes = [
            LinearAxes::new().with_output("model"),
            LinearAxes::new()
                .with_input("model")
                .with_contracted("model"),
        ];
        let vars = parts(&axes, &mesh, &whole())?.map(|x| Var::from_tensor(&x).unwrap());
        let [w1, b1, w2, b2] = vars.each_ref().map(|var| var.as_tensor().clone());
        Ok(Self {
            up: ParallelLinear::new(w1, Some(b1), axes[0].clone(), &mesh, "up")?,
            down: ParallelLinear::new(w2, Some(b2), axes[1].clone(), &mesh, "down")?,
            mesh,
            axes,
            vars,
        })
    }

    fn forward(&self, x: &Tensor) -> fp8::Result<Tensor> {
        let hidden = self.up.try_forward(x)?;
        self.down.try_forward(&hidden.relu()?)
    }

    fn optimizer(&self) -> fp8::Result<Sgd> {
        let axis = self.mesh.axis("model").expect("an axis");
        let optimizer = Sgd::from_named(named(&self.vars), config())?;
        Ok(optimizer.with_parts(axis, |name| name != "down.bias")?)
    }
}

/// A rank's parts of whole variables.
fn parts(
    axes: &[LinearAxes; 2],
    mesh: &DeviceMesh,
    [w1, b1, w2, b2]: &[Tensor; 4],
) -> fp8::Result<[Tensor; 4]> {
    Ok([
        axes[0].part_of_weight(w1, mesh)?,
        axes[0].part_of_bias(b1, mesh)?,
        axes[1].part_of_weight(w2, mesh)?,
        axes[1].part_of_bias(b2, mesh)?,
    ])
}

fn assert_close(case: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dims(), expected.dims(), "{case}");
    for (got, expected) in flat(got).iter().zip(flat(expected)) {
        assert!((got - expected).abs() < 1e-5, "{case}: {got}, {expected}");
    }
}

#[test]
fn ranks_clip_by_the_norm_of_whole_gradients() {
    let expected = alone().unwrap();
    let results = threads::run(2, |group| -> fp8::Result<Trained> {
        let mlp = Mlp::new(&group)?;
        let got = train(&mlp.vars, mlp.optimizer()?, |x| mlp.forward(x))?;
        let of_whole: [Tensor; 4] = expected.vars.clone().try_into().expect("four");
        let own = parts(&mlp.axes, &mlp.mesh, &of_whole)?;
        assert_eq!(got.vars.len(), NAMES.len());
        for ((name, got), expected) in NAMES.iter().zip(&got.vars).zip(&own) {
            assert_close(name, got, expected);
        }
        Ok(got)
    });
    let results = results.into_iter().collect::<fp8::Result<Vec<_>>>();
    let results = results.unwrap();
    assert_eq!(results[0].clips, results[1].clips);
    assert_eq!(flat(&results[0].vars[3]), flat(&results[1].vars[3]));
    assert_eq!(results[0].clips.len(), expected.clips.len());
    for (got, expected) in results[0].clips.iter().zip(&expected.clips) {
        assert!(*expected < 1. && (got / expected - 1.).abs() < 1e-4);
    }
}

/// What [`Sgd::with_parts`] is for.
#[test]
fn without_agreement_whole_variables_drift_apart() {
    let biases = threads::run(2, |group| -> fp8::Result<Vec<f32>> {
        let mlp = Mlp::new(&group)?;
        let optimizer = Sgd::from_named(named(&mlp.vars), config())?;
        let got = train(&mlp.vars, optimizer, |x| mlp.forward(x))?;
        Ok(flat(&got.vars[3]))
    });
    let biases = biases.into_iter().collect::<fp8::Result<Vec<_>>>();
    let biases = biases.unwrap();
    assert_ne!(biases[0], biases[1]);
}

#[test]
fn a_gradient_of_one_rank_makes_all_skip() {
    // Of a part, and of a variable that both ranks hold whole.
    for index in [0, 3] {
        let results = threads::run(2, |group| -> fp8::Result<()> {
            let mlp = Mlp::new(&group)?;
            let mut optimizer = mlp.optimizer()?;
            assert_eq!(optimizer.agreed_non_finite(group.rank())?, 1);
            let loss = mlp.forward(&tensor(10, &[TOKENS, IN]))?.sqr()?.sum_all()?;
            let mut grads = fp8::backward(&loss)?;
            if group.rank() == 1 {
                let var = &mlp.vars[index];
                let broken = (grads.get(var).expect("a gradient") * f64::NAN)?;
                grads.insert(var, broken);
            }
            let before: Vec<_> = mlp.vars.iter().map(|var| flat(var.as_tensor())).collect();
            assert!(optimizer.apply(&grads)?.skipped()?);
            let after: Vec<_> = mlp.vars.iter().map(|var| flat(var.as_tensor())).collect();
            assert_eq!((before, optimizer.steps()?), (after, 0));
            Ok(())
        });
        for result in results {
            result.unwrap();
        }
    }
}

/// Weights whose input features are divided over the axis of the batch stay out of [`DataParallel`], and the bias does not.
#[test]
fn input_features_divided_like_the_batch() {
    let names = ["fc.weight", "fc.bias"].map(str::to_string);
    let values = || [tensor(1, &[OUT, IN]), bias(2, OUT)];
    let loss = |y: Tensor| -> fp8::Result<Tensor> { Ok((y.sqr()?.mean_all()? * 100.)?) };

    let all = values().map(|x| Var::from_tensor(&x).unwrap());
    let [w, b] = all.each_ref().map(|var| var.as_tensor().clone());
    let layer = Linear::new(w, Some(b));
    let vars = names.iter().cloned().zip(all.iter().cloned()).collect();
    let mut optimizer = Sgd::from_named(vars, config()).unwrap();
    for step in 0..STEPS {
        let y = layer.try_forward(&tensor(10 + step, &[TOKENS, IN]));
        let grads = fp8::backward(&loss(y.unwrap()).unwrap()).unwrap();
        let report = optimizer.apply(&grads).unwrap();
        assert!(report.clip_coefficient().unwrap() < 1.);
    }
    let expected = all.map(|var| var.as_detached_tensor());

    let results = threads::run(2, |group| -> fp8::Result<Vec<f32>> {
        let mesh = DeviceMesh::new(&group, &[("data", 2)])?;
        let data = mesh.axis("data").expect("an axis");
        let axes = LinearAxes::new().with_batch("data").with_contracted("data");
        let [weight, bias] = values();
        let weight = Var::from_tensor(&axes.part_of_weight(&weight, &mesh)?)?;
        let bias = Var::from_tensor(&axes.part_of_bias(&bias, &mesh)?)?;
        // The map of the weight is not DataParallel's.
        let (own, shared) = (VarMap::new(), VarMap::new());
        for (map, name, var) in [(&own, &names[0], &weight), (&shared, &names[1], &bias)] {
            map.data().lock().unwrap().insert(name.clone(), var.clone());
        }
        let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
        let layer = ParallelLinear::new(w, Some(b), axes.clone(), &mesh, "fc")?;
        let mut parallel = DataParallel::new(data, &shared, DataParallelOptions::default())?;
        let mut vars = vec![];
        for map in [&own, &shared] {
            let map = map.data().lock().unwrap();
            vars.extend(map.iter().map(|(name, var)| (name.clone(), var.clone())));
        }
        let optimizer = Sgd::from_named(vars, config())?;
        let mut optimizer = optimizer.with_parts(data, |name| name == "fc.weight")?;
        let rows = TOKENS / data.size();
        for step in 0..STEPS {
            let x = tensor(10 + step, &[TOKENS, IN]);
            let x = x.narrow(0, data.rank() * rows, rows)?.contiguous()?;
            let grads = parallel.backward(&loss(layer.try_forward(&x)?)?)?;
            optimizer.apply(&grads)?;
        }
        let part = axes.part_of_weight(&expected[0], &mesh)?;
        assert_close("weight", weight.as_tensor(), &part);
        assert_close("bias", bias.as_tensor(), &expected[1]);
        Ok(flat(bias.as_tensor()))
    });
    let biases = results.into_iter().collect::<fp8::Result<Vec<_>>>();
    let biases = biases.unwrap();
    assert_eq!(biases[0], biases[1]);
}
