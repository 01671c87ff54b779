//! New layers in parts: their first values are those of parts of a new linear layer.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_ranks::{DeviceMesh, threads};
use fp8_recipes::Result;
use fp8_recipes::nn::{self, column_parallel_linear, row_parallel_linear};
use fp8_test_support::{assert_text, flat64, largest};

const IN: usize = 512;
const OUT: usize = 256;
const RANKS: usize = 2;

/// Mean and standard deviation.
fn moments(x: &Tensor) -> [f64; 2] {
    let values = flat64(x);
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let square = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    [mean, square.sqrt()]
}

/// Normal values like those of `whole`. The standard deviation of 65536 normal values is off by 0.3%, their mean by 0.4% of it.
#[track_caller]
fn assert_part(part: &Tensor, whole: &Tensor) {
    let [mean, deviation] = moments(part);
    let [_, expected] = moments(whole);
    assert!(mean.abs() < 0.04 * expected, "{mean} of {expected}");
    let ratio = deviation / expected;
    assert!((0.96..1.04).contains(&ratio), "{ratio}");
}

/// Weight and bias of a new layer divided over its outputs, then of one divided over its inputs.
fn new_layers() -> Vec<[[Tensor; 2]; 2]> {
    let results = threads::run(RANKS, |group| -> Result<_> {
        let mesh = DeviceMesh::new(&group, &[("model", RANKS)])?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let column = column_parallel_linear(IN, OUT, vb.pp("column"), &mesh, "model")?;
        let row = row_parallel_linear(IN, OUT, vb.pp("row"), &mesh, "model")?;
        let of = |layer: &nn::ParallelLinear| -> Result<_> {
            let bias = layer.bias().cloned().expect("a bias");
            Ok([layer.part().weight()?, bias])
        };
        Ok([of(&column)?, of(&row)?])
    });
    let results = results.into_iter().map(|layers| layers.unwrap());
    results.collect()
}

#[test]
fn new_layers_begin_like_parts_of_a_linear_layer() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let whole = nn::linear(IN, OUT, vb).unwrap();
    let (weight, bias) = (whole.weight().unwrap(), whole.bias().unwrap());
    // Uniform up to this, as f32 has it.
    let bound = 1. / (IN as f64).sqrt() * (1. + 1e-6);
    assert!(largest(bias) <= bound && largest(bias) > bound / 2.);
    let ranks = new_layers();
    for [[columns, part], [rows, sum]] in &ranks {
        assert_eq!(columns.dims(), [OUT / RANKS, IN]);
        assert_part(columns, &weight);
        assert_eq!(part.dims(), [OUT / RANKS]);
        assert!(largest(part) <= bound && largest(part) > bound / 2.);
        // Products over parts of the inputs are added, so their weights have the spread for all inputs.
        assert_eq!(rows.dims(), [OUT, IN / RANKS]);
        assert_part(rows, &weight);
        // Added after the sum, by each rank: the same on all.
        assert_eq!(sum.dims(), [OUT]);
        assert_eq!(flat64(sum), vec![0.; OUT]);
    }
    let [first, second] = &ranks[..] else {
        panic!("{} ranks", ranks.len());
    };
    for layer in 0..2 {
        assert_ne!(flat64(&first[layer][0]), flat64(&second[layer][0]));
    }
}

#[test]
fn features_that_cannot_be_divided_are_refused() {
    let errors = threads::run(RANKS, |group| {
        let mesh = DeviceMesh::new(&group, &[("model", RANKS)]).unwrap();
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let column = column_parallel_linear(4, 7, vb.pp("column"), &mesh, "model");
        let row = row_parallel_linear(5, 4, vb.pp("row"), &mesh, "model");
        [column, row].map(|layer| layer.unwrap_err().to_string())
    });
    for [column, row] in errors {
        assert_text("column", column, &["`column`", "7 features", "2 ranks"]);
        assert_text("row", row, &["`row`", "5 features", "2 ranks"]);
    }
}
