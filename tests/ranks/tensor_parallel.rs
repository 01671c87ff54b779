//! Linear layers in parts, against the layer on one rank: every way to divide tokens, features of x, and both dimensions of the weight
//! over a mesh of 2 x 2 ranks.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_candle::state::ReductionGroup;
use fp8::fp8_candle::{Quantizer, Shards};
use fp8::fp8_core::{Contraction, Format, Granularity};
use fp8::nn::{Linear, LinearAxes, ParallelLinear, column_parallel_linear, row_parallel_linear};
use fp8::ranks::{DeviceMesh, ProcessGroup, threads};
use fp8::{
    Autocast, CastObserver, Fp8Module, PrepareOptions, Recipe, end_step, fp8_autocast, prepare_fp8,
};
use fp8_test_support::{flat, tensor};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const TOKENS: usize = 8;
const IN: usize = 32;
const OUT: usize = 48;
const AXES: [&str; 2] = ["data", "model"];

/// None or one of [`AXES`], for tokens, features of x, input and output features of the weight.
fn assignments() -> Vec<LinearAxes> {
    let mut all = vec![];
    for code in 0..81 {
        let digit = |place: u32| match code / 3usize.pow(place) % 3 {
            0 => None,
            axis => Some(AXES[axis - 1].to_string()),
        };
        let [batch, input, contracted, output] = [0, 1, 2, 3].map(digit);
        let differ = |a: &Option<String>, b: &Option<String>| a.is_none() || a != b;
        if differ(&batch, &input) && differ(&contracted, &output) && differ(&batch, &output) {
            let mut axes = LinearAxes::new();
            (axes.batch, axes.input) = (batch, input);
            (axes.contracted, axes.output) = (contracted, output);
            all.push(axes);
        }
    }
    all
}

/// Values, codes and scales of one cast.
#[derive(Clone, Debug)]
struct Seen {
    values: Vec<Vec<f32>>,
    codes: Vec<Vec<f32>>,
    dequant_scale: Vec<f32>,
}

type Casts = BTreeMap<String, Vec<Seen>>;

/// One or more steps of a layer: y, the gradients of x, weight and bias of the last, and all casts by operand.
struct Outcome {
    y: Tensor,
    grads: [Tensor; 3],
    casts: Casts,
}

fn steps(
    recipe: &Recipe,
    model: &impl Fp8Module,
    forward: impl Fn(&Tensor) -> fp8::Result<Tensor>,
    [x, weight, bias]: [&Var; 3],
    grad: &Tensor,
    group: Option<&ProcessGroup>,
) -> fp8::Result<Outcome> {
    prepare_fp8(model, &PrepareOptions::default())?;
    let casts = Arc::new(Mutex::new(Casts::new()));
    let list = casts.clone();
    let observer = CastObserver::new(move |event| {
        let matrix = |x: &Tensor| {
            let x = x.to_dtype(DType::F32).unwrap();
            let cols = *x.dims().last().unwrap();
            let rows = x.elem_count() / cols;
            x.reshape((rows, cols)).unwrap().to_vec2::<f32>().unwrap()
        };
        let scale = event.quantized.dequant_scale();
        let seen = Seen {
            values: matrix(event.values),
            codes: matrix(&event.quantized.dequantize(DType::F32).unwrap()),
            dequant_scale: scale.flatten_all().unwrap().to_vec1().unwrap(),
        };
        let mut list = list.lock().unwrap();
        list.entry(event.operand.to_string())
            .or_default()
            .push(seen);
    });
    let mut last = None;
    for _ in 0..2 {
        let mut autocast = Autocast::new(recipe.clone()).with_cast_observer(&observer);
        autocast.reduction_group = group.map(|group| Arc::new(group.clone()) as _);
        let guard = fp8_autocast(autocast)?;
        let y = forward(x.as_tensor())?;
        let grads = fp8::backward(&(&y * grad)?.sum_all()?)?;
        guard.close()?;
        let of = |var: &Var| grads.get(var).cloned().expect("a gradient");
        last = Some((y.detach(), [of(x), of(weight), of(bias)]));
    }
    end_step()?;
    let (y, grads) = last.expect("two steps");
    let casts = std::mem::take(&mut *casts.lock().unwrap());
    Ok(Outcome { y, grads, casts })
}

fn inputs() -> [Tensor; 4] {
    let bias = tensor(3, &[1, OUT]).flatten_all().unwrap();
    [
        tensor(1, &[TOKENS, IN]),
        tensor(2, &[OUT, IN]),
        bias,
        tensor(4, &[TOKENS, OUT]),
    ]
}

fn whole(recipe: &Recipe) -> Outcome {
    let [x, weight, bias, grad] = inputs();
    let [x, weight, bias] = [x, weight, bias].map(|t| Var::from_tensor(&t).unwrap());
    let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    let layer = layer.with_path("fc");
    let forward = |x: &Tensor| layer.try_forward(x);
    steps(recipe, &layer, forward, [&x, &weight, &bias], &grad, None).unwrap()
}

/// The rows (0) or columns (1) that a rank has of a dimension.
fn part_of(mesh: &DeviceMesh, axis: &Option<String>, len: usize) -> (usize, usize) {
    match axis {
        None => (0, len),
        Some(axis) => {
            let group = mesh.axis(axis).unwrap();
            let part = len / group.size();
            (group.rank() * part, part)
        }
    }
}

fn cut(x: &Tensor, rows: (usize, usize), cols: (usize, usize)) -> Tensor {
    let x = x.narrow(0, rows.0, rows.1).unwrap();
    x.narrow(1, cols.0, cols.1).unwrap().contiguous().unwrap()
}

/// Largest error that sums of `terms` products in f32 may have in any order, twice, from the magnitudes of the products.
fn assert_sums(case: &str, got: &Tensor, expected: &Tensor, magnitudes: &Tensor, terms: usize) {
    let bound = 2. * (terms as f64 + 8.) * f64::from(f32::EPSILON);
    let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(got.dims(), expected.dims(), "{case}");
    for ((got, expected), size) in flat(got).iter().zip(flat(expected)).zip(flat(magnitudes)) {
        let error = f64::from((got - expected).abs());
        assert!(
            error <= bound * f64::from(size),
            "{case}: {got} for {expected}"
        );
    }
}

/// Checks one rank of one assignment against the whole layer.
fn check(
    group: &ProcessGroup,
    recipe: &Recipe,
    axes: &LinearAxes,
    expected: &Outcome,
    rowwise: bool,
) -> fp8::Result<()> {
    let mesh = DeviceMesh::new(group, &[("data", 2), ("model", 2)])?;
    let [x, weight, bias, grad] = inputs();
    let rows = part_of(&mesh, &axes.batch, TOKENS);
    let (given, kept) = (
        part_of(&mesh, &axes.input, IN),
        part_of(&mesh, &axes.contracted, IN),
    );
    let out = part_of(&mesh, &axes.output, OUT);
    let var = |t: &Tensor| Var::from_tensor(t);
    let own_x = var(&cut(&x, rows, given))?;
    let own_weight = var(&axes.part_of_weight(&weight, &mesh)?)?;
    let own_bias = var(&axes.part_of_bias(&bias, &mesh)?)?;
    let (w, b) = (own_weight.as_tensor().clone(), own_bias.as_tensor().clone());
    let layer = ParallelLinear::new(w, Some(b), axes.clone(), &mesh, "fc")?;
    let own_grad = cut(&grad, rows, out);
    let forward = |x: &Tensor| layer.try_forward(x);
    let vars = [&own_x, &own_weight, &own_bias];
    let got = steps(recipe, &layer, forward, vars, &own_grad, Some(group))?;

    let case = |what: &str| format!("{axes}, rank {}: {what}", group.rank());
    // The features of x that the rank multiplies with.
    let gathers = axes.contracted.is_some() && axes.contracted == axes.batch;
    let used = if gathers { (0, IN) } else { kept };
    for (operand, all) in &expected.casts {
        let (rows, cols) = match operand.split('_').next() {
            Some("input") => (rows, used),
            Some("weight") => (out, used),
            _ => (rows, out),
        };
        let own = &got.casts[operand];
        assert!(!own.is_empty(), "{}", case(operand));
        for (own, all) in own.iter().rev().zip(all.iter().rev()) {
            let of_part = |all: &[Vec<f32>]| -> Vec<Vec<f32>> {
                let part = all[rows.0..rows.0 + rows.1].iter();
                part.map(|row| row[cols.0..cols.0 + cols.1].to_vec())
                    .collect()
            };
            // grad_output of a second step is that of the first: no result is cast.
            assert_eq!(own.values, of_part(&all.values), "{}", case(operand));
            assert_eq!(own.codes, of_part(&all.codes), "{}: codes", case(operand));
            if !rowwise {
                assert_eq!(
                    own.dequant_scale,
                    all.dequant_scale,
                    "{}: scales",
                    case(operand)
                );
            }
        }
    }

    let magnitude = |a: &Tensor, b: &Tensor| a.abs()?.matmul(&b.abs()?);
    let (wt, gt) = (weight.t()?, grad.t()?.contiguous()?);
    let sizes = magnitude(&x, &wt)?.broadcast_add(&bias.abs()?)?;
    let part = |t: &Tensor, rows, cols| cut(t, rows, cols);
    let y = part(&expected.y, rows, out);
    assert_sums(&case("y"), &got.y, &y, &part(&sizes, rows, out), IN);
    let sizes = magnitude(&grad, &weight)?;
    let grad_x = part(&expected.grads[0], rows, given);
    assert_sums(
        &case("grad_x"),
        &got.grads[0],
        &grad_x,
        &part(&sizes, rows, given),
        OUT,
    );
    // Gradients of weight and bias are summands of this rank's tokens, or the mean where the weight was gathered.
    let sizes = magnitude(&gt, &x)?;
    let grad_weight = match (&axes.batch, gathers) {
        (None, _) => got.grads[1].clone(),
        (Some(_), true) => (&got.grads[1] * 2.)?,
        (Some(axis), false) => {
            let group = mesh.axis(axis).expect("an axis");
            group.all_reduce(&got.grads[1], fp8::ranks::ReduceOp::Sum)?
        }
    };
    let all = part(&expected.grads[1], out, kept);
    assert_sums(
        &case("grad_weight"),
        &grad_weight,
        &all,
        &part(&sizes, out, kept),
        TOKENS,
    );
    let grad_bias = match &axes.batch {
        None => got.grads[2].clone(),
        Some(axis) => {
            let group = mesh.axis(axis).expect("an axis");
            group.all_reduce(&got.grads[2], fp8::ranks::ReduceOp::Sum)?
        }
    };
    let sizes = grad.abs()?.sum(0)?.narrow(0, out.0, out.1)?;
    let all = expected.grads[2].narrow(0, out.0, out.1)?;
    assert_sums(&case("grad_bias"), &grad_bias, &all, &sizes, TOKENS);
    Ok(())
}

#[test]
fn every_assignment_equals_the_whole_layer() {
    let all = assignments();
    assert_eq!(all.len(), 41);
    for name in ["delayed", "tensorwise", "current", "rowwise"] {
        let recipe: Recipe = name.parse().unwrap();
        let expected = whole(&recipe);
        assert!(!expected.casts.is_empty());
        for axes in &all {
            let results = threads::run(4, |group| {
                check(&group, &recipe, axes, &expected, name == "rowwise")
            });
            for result in results {
                if let Err(error) = result {
                    panic!("{name}: {axes}: {error}");
                }
            }
        }
    }
}

/// Sums over ranks and whole results would have other codes than the parts.
#[test]
fn results_of_parts_are_not_cast() {
    let results = threads::run(2, |group| -> fp8::Result<Vec<String>> {
        let mesh = DeviceMesh::new(&group, &[("model", 2)])?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let up = column_parallel_linear(IN, OUT, vb.pp("up"), &mesh, "model")?;
        let down = row_parallel_linear(OUT, IN, vb.pp("down"), &mesh, "model")?;
        let mut errors = vec![];
        for (layer, features) in [(&up, IN), (&down, OUT / 2)] {
            prepare_fp8(layer, &PrepareOptions::default())?;
            for recipe in ["hybrid", "direct"] {
                let guard = fp8_autocast(Autocast::new(recipe.parse::<Recipe>()?))?;
                let error = layer.try_forward(&tensor(1, &[TOKENS, features]));
                errors.push(error.expect_err(recipe).to_string());
                guard.abort();
            }
        }
        Ok(errors)
    });
    for result in results {
        let errors = result.unwrap();
        for (error, path) in errors.iter().zip(["up", "up", "down", "down"]) {
            let layer = format!("layer `{path}`");
            assert!(
                error.contains(&layer) && error.contains("casts output"),
                "{error}"
            );
        }
    }
}

/// The grid of such a part looks the same for scales of rows and of columns.
#[test]
fn parts_of_one_row_or_column_have_the_codes_of_the_whole() {
    for (rows, cols) in [(6, 2), (2, 6), (2, 2)] {
        let x = tensor(1, &[rows, cols]);
        for contraction in [Contraction::Cols, Contraction::Rows] {
            let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
            let cast = |quantizer: &Quantizer, x: &Tensor| -> fp8::Result<Tensor> {
                let cast = quantizer.quantize(x, contraction)?;
                Ok(cast.tensor.dequantize(DType::F32)?)
            };
            let whole = cast(&quantizer, &x).unwrap();
            let results = threads::run(4, |group| -> fp8::Result<()> {
                let mesh = DeviceMesh::new(&group, &[("data", 2), ("model", 2)])?;
                let [rows, cols] = [("data", rows), ("model", cols)]
                    .map(|(axis, len)| part_of(&mesh, &Some(axis.to_string()), len));
                let along = |axis: &str| {
                    let group = mesh.axis(axis).expect("an axis").clone();
                    Some(Arc::new(group) as Arc<dyn ReductionGroup>)
                };
                let all = Some(Arc::new(group.clone()) as Arc<dyn ReductionGroup>);
                let shards = Shards::new(along("data"), along("model"), all);
                let quantizer = quantizer.clone().with_shards(shards);
                let part = cast(&quantizer, &cut(&x, rows, cols))?;
                let case = format!("{rows:?}, {cols:?}, {contraction:?}");
                assert_eq!(flat(&part), flat(&cut(&whole, rows, cols)), "{case}");
                Ok(())
            });
            for result in results {
                result.unwrap();
            }
        }
    }
}

#[test]
fn axes_that_do_not_fit_are_named() {
    let errors = threads::run(2, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 1), ("model", 2)]).unwrap();
        let weight = Tensor::zeros((6, 5), DType::F32, &Device::Cpu).unwrap();
        let new = |axes: LinearAxes| {
            let layer = ParallelLinear::new(weight.clone(), None, axes, &mesh, "fc");
            layer.expect_err("an error").to_string()
        };
        let odd = LinearAxes::new().with_contracted("model");
        [
            new(LinearAxes::new().with_output("modle")),
            new(LinearAxes::new().with_batch("model").with_output("model")),
            odd.part_of_weight(&weight, &mesh).unwrap_err().to_string(),
        ]
    });
    for errors in errors {
        assert!(
            errors[0].contains("no axis `modle`, but data, model"),
            "{}",
            errors[0]
        );
        assert!(errors[1].contains("two dimensions of y"), "{}", errors[1]);
        assert!(
            errors[2].contains("5 cannot be divided evenly over 2"),
            "{}",
            errors[2]
        );
    }
}
