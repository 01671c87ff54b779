//! Quantization after training, on the digits.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use fp8_core::Format;
use fp8_recipes::{
    CastStats, Error, Fp8Module, LayerFilter, PrepareOptions, PtqScheme, load, nn, quantize_model,
    save_calibrated, with_fp8,
};
use fp8_test_support::{named, sqnr};
use rand::{Rng, SeedableRng};
use std::path::Path;

const CPU: &Device = &Device::Cpu;
const TRAIN: usize = 1437;

#[derive(Fp8Module)]
struct Mlp {
    up: nn::Linear,
    down: nn::Linear,
}

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> Self {
        Self {
            up: nn::linear(64, 64, vb.pp("up")).unwrap(),
            down: nn::linear(64, 10, vb.pp("down")).unwrap(),
        }
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.relu()?)
    }
}

/// Images `[n, 64]` between 0 and 1, labels `[n]`: for training, for testing.
fn digits() -> [(Tensor, Tensor); 2] {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/digits.safetensors"
    );
    let tensors = candle_core::safetensors::load(path, CPU).unwrap();
    let images = tensors["images"].to_dtype(DType::F32).unwrap();
    let (images, labels) = ((images / 16.).unwrap(), &tensors["labels"]);
    let labels = labels.to_dtype(DType::U32).unwrap();
    let rest = labels.dim(0).unwrap() - TRAIN;
    [(0, TRAIN), (TRAIN, rest)].map(|(from, len)| {
        let part = |t: &Tensor| t.narrow(0, from, len).unwrap().contiguous().unwrap();
        (part(&images), part(&labels))
    })
}

/// A net trained in f32: 220 steps of SGD on 128 digits each.
fn trained(train: &(Tensor, Tensor)) -> Mlp {
    let vars = VarMap::new();
    let net = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, CPU));
    let mut rng = rand::rngs::StdRng::seed_from_u64(3);
    // In a fixed order: that of a VarMap is random.
    let named = named(&vars);
    for (_, var) in &named {
        let values: Vec<f32> = (0..var.elem_count())
            .map(|_| rng.random_range(-0.125..0.125))
            .collect();
        let values = Tensor::from_vec(values, var.dims(), CPU).unwrap();
        var.set(&values).unwrap();
    }
    let mut sgd = SGD::new(named.into_iter().map(|(_, var)| var).collect(), 0.5).unwrap();
    for _ in 0..220 {
        let rows: Vec<u32> = (0..128)
            .map(|_| rng.random_range(0..TRAIN as u32))
            .collect();
        let rows = Tensor::from_vec(rows, 128, CPU).unwrap();
        let take = |t: &Tensor| t.index_select(&rows, 0).unwrap();
        let logits = net.forward(&take(&train.0)).unwrap();
        let loss = nn::loss::cross_entropy(&logits, &take(&train.1)).unwrap();
        sgd.backward_step(&loss).unwrap();
    }
    net
}

fn accuracy(logits: &Tensor, labels: &Tensor) -> f64 {
    let right = logits.argmax(1).unwrap().eq(labels).unwrap();
    let right = right.to_dtype(DType::F32).unwrap();
    f64::from(right.mean_all().unwrap().to_scalar::<f32>().unwrap())
}

fn calibrate(net: &Mlp, images: &Tensor) -> candle_core::Result<()> {
    for batch in images.chunk(6, 0)? {
        net.forward(&batch)?;
    }
    Ok(())
}

/// Two casts per product: of 3 bits of mantissa about 31 dB each, of 2 bits about 25; 6 dB less for the layers in sequence and
/// for values of very different sizes.
#[test]
fn quantized_digits_are_told_apart_as_well_as_in_f32() {
    let [train, test] = digits();
    let net = trained(&train);
    let exact = net.forward(&test.0).unwrap();
    let plain = accuracy(&exact, &test.1);
    println!("f32: accuracy {plain:.4}");
    assert!(plain > 0.93, "{plain}");
    for (scheme, least) in [(PtqScheme::E4m3, 24.), (PtqScheme::E5m2, 18.)] {
        let options = PrepareOptions::default();
        let quantized =
            quantize_model(&net, scheme, &options, || calibrate(&net, &train.0)).unwrap();
        assert_eq!(quantized.report.converted(), 2);
        let stats = CastStats::default();
        let logits = with_fp8(quantized.autocast().with_stats(&stats), || {
            net.forward(&test.0)
        });
        let logits = logits.unwrap();
        let (accuracy, db) = (accuracy(&logits, &test.1), sqnr(&exact, &logits));
        println!("{scheme}: accuracy {accuracy:.4}, {db:.1} dB");
        assert!(
            (accuracy - plain).abs() <= 0.01,
            "{scheme}: {accuracy} {plain}"
        );
        assert!(db > least && db < 60., "{scheme}: {db} dB");
        // What was cast: whole inputs with one scale, weights with one for each channel.
        let rows = stats.report().rows;
        assert!(rows.iter().any(|row| row.operand == "input"), "{rows:?}");
        for row in rows {
            assert_eq!(row.format, scheme.input(), "{row:?}");
            match row.operand {
                "input" => assert_eq!(row.quant_scale_min, row.quant_scale_max),
                _ => assert!(row.quant_scale_min < row.quant_scale_max, "{row:?}"),
            }
        }
        // Static: a batch of other values is cast with the scale of the calibration, and nothing moves.
        let scale = |layer: &nn::Linear| {
            let slot = layer.fp8_state().unwrap();
            let slot = slot
                .slot(fp8_recipes::Role::Input)
                .unwrap()
                .tensors()
                .unwrap();
            slot.dequant_scale
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()[0]
        };
        assert_eq!(scale(&net.up), 1. / scheme.input().max(), "images end at 1");
        let before = scale(&net.down);
        with_fp8(quantized.autocast(), || net.forward(&(&test.0 * 3.)?)).unwrap();
        assert_eq!(scale(&net.down), before);
        // Without the guard the model is what it was.
        assert_eq!(
            net.forward(&test.0).unwrap().to_vec2::<f32>().unwrap(),
            exact.to_vec2::<f32>().unwrap()
        );
    }
}

#[test]
fn what_was_quantized_in_e4m3_is_written_and_serves_the_same() {
    let [train, test] = digits();
    let net = trained(&train);
    let directory = tempfile::tempdir().unwrap();
    let quantize = |scheme| {
        let options = PrepareOptions::default();
        quantize_model(&net, scheme, &options, || calibrate(&net, &train.0)).unwrap()
    };
    let quantized = quantize(PtqScheme::E5m2);
    drop(quantized);
    let error = save_calibrated(&net, directory.path())
        .unwrap_err()
        .to_string();
    assert!(error.contains("e5m2"), "{error}");

    let quantized = quantize(PtqScheme::E4m3);
    let logits = with_fp8(quantized.autocast(), || net.forward(&test.0)).unwrap();
    let written = save_calibrated(&net, directory.path()).unwrap();
    assert_eq!(written.quantized, ["up", "down"]);
    let served = served(&written.model, &test.0);
    let db = sqnr(&logits, &served);
    // Scales of rows are quotients of another order, so that a few values at ties fall otherwise.
    assert!(db > 40., "{db}");
}

fn served(model: &Path, x: &Tensor) -> Tensor {
    let vb = load::var_builder(&[model], DType::F32, CPU).unwrap();
    let net = Mlp::new(vb);
    assert_eq!(
        net.up.static_weight().unwrap().codes().format(),
        Format::E4M3
    );
    net.forward(x).unwrap()
}

#[test]
fn layers_without_a_batch_and_models_without_layers_are_named() {
    let [train, _] = digits();
    let net = trained(&train);
    let options = PrepareOptions::default();
    let only_up = quantize_model(&net, PtqScheme::E4m3, &options, || net.up.forward(&train.0));
    let error = only_up.unwrap_err();
    assert!(
        matches!(&error, Error::Export(fp8_recipes::ExportError::NotCalibrated { path }) if path == "down"),
        "{error}"
    );
    let failing = quantize_model(&net, PtqScheme::E4m3, &options, || {
        net.forward(&train.0)?;
        candle_core::bail!("no more batches") as candle_core::Result<()>
    });
    assert!(failing.unwrap_err().to_string().contains("no more batches"));
    let none = nn::layer_norm(4, 1e-5, VarBuilder::zeros(DType::F32, CPU)).unwrap();
    let error = quantize_model(&none, PtqScheme::E4m3, &options, || Ok(())).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Export(fp8_recipes::ExportError::NothingToQuantize)
        ),
        "{error}"
    );
    // A layer that is left out stays in high precision.
    let net = trained(&train);
    let options = PrepareOptions::default().with_filter(LayerFilter::new().skip_paths(["down"]));
    let quantized = quantize_model(&net, PtqScheme::E4m3, &options, || {
        calibrate(&net, &train.0)
    });
    assert_eq!(quantized.unwrap().report.converted(), 1);
    assert!(net.down.fp8_state().is_none());
}

fn input_scale(layer: &nn::Linear) -> f32 {
    let state = layer.fp8_state().unwrap();
    let slot = state.slot(fp8_recipes::Role::Input).unwrap().tensors();
    let scale = slot.unwrap().dequant_scale.flatten_all().unwrap();
    scale.to_vec1::<f32>().unwrap()[0]
}

/// The second calibration is of its own batches, not of those of the first, and an old one calibrates no layer.
#[test]
fn quantizing_again_begins_anew() {
    let [train, _] = digits();
    let net = trained(&train);
    let options = PrepareOptions::default();
    let quantize = |factor: f64| {
        let images = (&train.0 * factor).unwrap();
        quantize_model(&net, PtqScheme::E4m3, &options, || calibrate(&net, &images))
    };
    let max = Format::E4M3.max();
    quantize(255.).unwrap();
    assert_eq!(input_scale(&net.up), 255. / max);
    quantize(1.).unwrap();
    assert_eq!(input_scale(&net.up), 1. / max);
    let again = quantize_model(&net, PtqScheme::E4m3, &options, || net.up.forward(&train.0));
    let error = again.unwrap_err();
    assert!(
        matches!(&error, Error::Export(fp8_recipes::ExportError::NotCalibrated { path }) if path == "down"),
        "{error}"
    );
}

/// Operators have nothing to quantize.
#[test]
fn operators_alone_are_nothing_to_quantize() {
    let [train, _] = digits();
    let net = (trained(&train), nn::Add::new("residual"));
    let all = LayerFilter::new().skip_paths(["up", "down"]);
    let options = PrepareOptions::default()
        .with_operators(true)
        .with_filter(all);
    let error = quantize_model(&Both(net), PtqScheme::E4m3, &options, || Ok(())).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Export(fp8_recipes::ExportError::NothingToQuantize)
        ),
        "{error}"
    );
}

struct Both((Mlp, nn::Add));

impl fp8_recipes::Fp8Module for Both {
    fn visit(&self, visitor: &mut dyn fp8_recipes::Visitor) {
        self.0.0.visit(visitor);
        self.0.1.visit(visitor);
    }
}
