//! The example `train_vision`: the images it reads, and a few steps of each of its runs.

#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../examples/images/mod.rs"]
mod images;
#[path = "../examples/train_vision/net.rs"]
mod net;
#[allow(dead_code, reason = "scaled_mnist uses the rest")]
#[path = "../examples/shared/parameters.rs"]
mod parameters;
#[path = "../examples/train_vision/run.rs"]
mod run;

use candle_core::Tensor;
use flate2::Compression;
use flate2::write::GzEncoder;
use fp8::RecipeName;
use fp8_test_support::rounding::two_orders;
use images::data::{Data, Split};
use images::epochs::Epochs;
use net::ModelName;
use run::{Settings, train};
use std::io::Write;
use std::path::Path;

/// An IDX file of bytes.
fn idx(dims: &[u32], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dims.len() as u8];
    bytes.extend(dims.iter().flat_map(|dim| dim.to_be_bytes()));
    bytes.extend(values);
    bytes
}

fn write(folder: &Path, name: &str, bytes: &[u8], packed: bool) {
    match packed {
        false => std::fs::write(folder.join(name), bytes).unwrap(),
        true => {
            let file = std::fs::File::create(folder.join(format!("{name}.gz"))).unwrap();
            let mut encoder = GzEncoder::new(file, Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap();
        }
    }
}

/// Three images of 2x2 to train with, one to test.
fn folder(packed: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let images: Vec<u8> = (0..12).map(|i| i * 20).collect();
    let files = [
        ("train-images-idx3-ubyte", idx(&[3, 2, 2], &images)),
        ("train-labels-idx1-ubyte", idx(&[3], &[0, 9, 4])),
        ("t10k-images-idx3-ubyte", idx(&[1, 2, 2], &images[..4])),
        ("t10k-labels-idx1-ubyte", idx(&[1], &[7])),
    ];
    for (name, bytes) in files {
        write(dir.path(), name, &bytes, packed);
    }
    dir
}

#[test]
fn idx_files_are_read_packed_or_not() {
    let load = |packed| {
        let dir = folder(packed);
        let data = Data::load(Some(dir.path())).unwrap();
        assert_eq!((data.size, data.train.len(), data.test.len()), (2, 3, 1));
        assert_eq!(data.train.labels.to_vec1::<u32>().unwrap(), [0, 9, 4]);
        data.train
            .images
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    let values = load(false);
    assert_eq!(values, load(true));
    let values = values.into_iter().map(f64::from);
    let mean = values.clone().sum::<f64>() / 12.;
    let squares = values.map(|x| x * x).sum::<f64>() / 12.;
    // Twelve values, and mean and deviation of twelve each, in f32.
    let bound = two_orders(12 + 2);
    assert!(mean.abs() <= bound && (squares - 1.).abs() <= 2. * bound);
}

#[test]
fn errors_say_what_is_wrong_with_a_folder() {
    let error = |change: &dyn Fn(&Path)| {
        let dir = folder(false);
        change(dir.path());
        let error = Data::load(Some(dir.path())).err().expect("an error");
        format!("{error:#}")
    };
    let images = "train-images-idx3-ubyte";
    type Change<'a> = &'a dyn Fn(&Path);
    let cases: [(Change<'_>, &[&str]); 6] = [
        (
            &|dir| std::fs::remove_file(dir.join(images)).unwrap(),
            &[images, "holds neither"],
        ),
        (
            &|dir| write(dir, images, &idx(&[3, 2, 2], &[1; 11]), false),
            &[images, "11 bytes", "[3, 2, 2]"],
        ),
        (
            &|dir| write(dir, images, &[0, 0], false),
            &[images, "cut off"],
        ),
        (
            &|dir| write(dir, images, &[1, 2, 3, 4, 5], false),
            &[images, "begins with 1 2 3"],
        ),
        (
            &|dir| write(dir, "t10k-labels-idx1-ubyte", &idx(&[1], &[10]), false),
            &["label 10", "0 to 9"],
        ),
        (
            &|dir| write(dir, "train-labels-idx1-ubyte", &idx(&[2], &[1, 2]), false),
            &["train", "labels [2]"],
        ),
    ];
    for (change, parts) in cases {
        let text = error(change);
        for part in parts {
            assert!(text.contains(part), "{text}: expected {part}");
        }
    }
    // Sizes whose product is beyond memory.
    let text = error(&|dir| write(dir, images, &idx(&[u32::MAX; 3], &[]), false));
    assert!(text.contains("0 bytes"), "{text}");
}

#[test]
fn the_digits_come_with_the_program() {
    let data = Data::load(Some(Path::new("digits"))).unwrap();
    let sizes = (data.name, data.size, data.train.len(), data.test.len());
    assert_eq!(sizes, ("digits", 8, 1437, 360));
    assert_eq!(data.test.images.dims(), [360, 1, 8, 8]);
}

/// 48 of the digits to train with, 16 to test.
fn few_digits() -> Data {
    let data = Data::load(Some(Path::new("digits"))).unwrap();
    let first = |split: Split, count| Split {
        images: split.images.narrow(0, 0, count).unwrap(),
        labels: split.labels.narrow(0, 0, count).unwrap(),
    };
    Data {
        train: first(data.train, 48),
        test: first(data.test, 16),
        ..data
    }
}

fn settings(model: ModelName) -> Settings {
    Settings {
        model,
        epochs: Epochs {
            count: 2,
            batch: 16,
            lr: 2e-3,
            seed: 1,
        },
        exempt: vec![],
    }
}

#[test]
fn every_recipe_trains_both_models() {
    let data = few_digits();
    let recipes = RecipeName::ALL.map(|recipe| recipe.to_string());
    for model in [ModelName::Mlp, ModelName::Conv] {
        for recipe in recipes.iter().map(String::as_str).chain(["f32"]) {
            let mut heard = vec![];
            let hear = |step, steps, loss| heard.push((step, steps, loss));
            let (summary, losses) = train(recipe, &settings(model), &data, hear).unwrap();
            let name = format!("{recipe}, {model:?}");
            let json = serde_json::to_value(&summary).unwrap();
            let mut keys: Vec<_> = json.as_object().unwrap().keys().collect();
            keys.sort();
            let expected = [
                "casts",
                "epochs",
                "final_train_loss",
                "loss_scale",
                "model",
                "recipe",
                "seed",
                "skipped_steps",
                "test_accuracy",
            ];
            assert_eq!(keys, expected, "{name}");
            assert_eq!(json["skipped_steps"], 0, "{name}");
            let emulated = ["direct", "hybrid"].contains(&recipe);
            assert_eq!(json["loss_scale"], if emulated { 65536. } else { 1. });
            let casts = |tensor: &str| json["casts"][tensor].as_u64().unwrap();
            assert_eq!(casts("input") > 0, recipe != "f32", "{name}");
            assert_eq!(casts("output") > 0, emulated, "{name}");
            assert!(
                losses.iter().all(|loss| loss.is_finite()),
                "{name}: {losses:?}"
            );
            let end = losses[3..].iter().sum::<f64>() / 3.;
            assert_eq!(summary.final_train_loss, end, "{name}");
            assert!(
                end < losses[..3].iter().sum::<f64>() / 3.,
                "{name}: {losses:?}"
            );
            assert_eq!((heard.len(), heard[5]), (6, (6, 6, losses[5])), "{name}");
        }
    }
    let error = train("fp9", &settings(ModelName::Mlp), &data, |_, _, _| {});
    let error = format!("{:#}", error.err().unwrap());
    assert!(error.contains("fp9"), "{error}");
}

/// One image holds an Inf: the step of each epoch that meets it is skipped and counted, with and without a loss scaler.
#[test]
fn steps_that_are_left_out_are_counted() {
    let mut data = few_digits();
    let mut values = data
        .train
        .images
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    values[64 * 7] = f32::INFINITY;
    data.train.images = Tensor::from_vec(
        values,
        data.train.images.shape(),
        data.train.images.device(),
    )
    .unwrap();
    for recipe in ["f32", "direct"] {
        let (summary, _) = train(recipe, &settings(ModelName::Mlp), &data, |_, _, _| {}).unwrap();
        assert_eq!(summary.skipped_steps, 2, "{recipe}");
        let scale = if recipe == "f32" { 1. } else { 16384. };
        assert_eq!(summary.loss_scale, scale);
    }
}
