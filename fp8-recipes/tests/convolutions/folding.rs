//! Batch norms of a whole model folded into the layers before them.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{self, ModuleT, adjacent_batch_norms, fold_batch_norms};
use fp8_recipes::{Error, Fp8Module, PrepareOptions, PtqScheme, quantize_model};
use fp8_test_support::flat64;

const CPU: &Device = &Device::Cpu;

#[derive(Fp8Module)]
struct Block {
    conv: nn::Conv2d,
    bn: nn::BatchNorm,
    depthwise: nn::Conv2d,
    norm: nn::BatchNorm,
}

#[derive(Fp8Module)]
struct Net {
    stem: Block,
    up: nn::ConvTranspose2d,
    bn_up: nn::BatchNorm,
    fc: nn::Linear,
    bn_fc: nn::BatchNorm,
    head: nn::Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> Self {
        let depthwise = nn::Conv2dConfig {
            groups: 6,
            padding: 1,
            ..Default::default()
        };
        let stem = vb.pp("stem");
        Self {
            stem: Block {
                conv: nn::conv2d_no_bias(3, 6, 3, Default::default(), stem.pp("conv")).unwrap(),
                bn: nn::batch_norm(6, 1e-3, stem.pp("bn")).unwrap(),
                depthwise: nn::conv2d(6, 6, 3, depthwise, stem.pp("depthwise")).unwrap(),
                norm: nn::batch_norm(6, 1e-5, stem.pp("norm")).unwrap(),
            },
            up: nn::conv_transpose2d(6, 6, 2, Default::default(), vb.pp("up")).unwrap(),
            bn_up: nn::batch_norm(6, 1e-5, vb.pp("bn_up")).unwrap(),
            fc: nn::linear_no_bias(6 * 5 * 5, 16, vb.pp("fc")).unwrap(),
            bn_fc: nn::batch_norm(16, 1e-5, vb.pp("bn_fc")).unwrap(),
            head: nn::linear(16, 16, vb.pp("head")).unwrap(),
        }
    }

    /// With running statistics of some batches.
    fn trained(dtype: DType) -> Self {
        let net = Self::new(VarBuilder::from_varmap(&VarMap::new(), dtype, CPU));
        for _ in 0..3 {
            net.forward_t(&input(dtype), true).unwrap();
        }
        net
    }

    fn pairs() -> Vec<(String, String)> {
        let pairs = [
            ("stem.conv", "stem.bn"),
            ("stem.depthwise", "stem.norm"),
            ("up", "bn_up"),
            ("fc", "bn_fc"),
        ];
        pairs.map(|(a, b)| (a.into(), b.into())).into()
    }
}

impl Net {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let Block {
            conv,
            bn,
            depthwise,
            norm,
        } = &self.stem;
        let y = bn.forward_t(&conv.forward(x)?, train)?.relu()?;
        let y = norm.forward_t(&depthwise.forward(&y)?, train)?.relu()?;
        let y = self.bn_up.forward_t(&self.up.forward(&y)?, train)?.relu()?;
        let y = self.fc.forward(&y.flatten_from(1)?)?;
        self.head.forward(&self.bn_fc.forward_t(&y, train)?.relu()?)
    }
}

impl Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.forward_t(x, false)
    }
}

fn input(dtype: DType) -> Tensor {
    Tensor::randn(0.5f64, 2., (8, 3, 6, 6), CPU)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

#[test]
fn a_folded_model_computes_the_same() {
    let net = Net::trained(DType::F64);
    let pairs = adjacent_batch_norms(&net);
    assert_eq!(pairs, Net::pairs());
    let tensors = fold_batch_norms(&net, &pairs).unwrap();
    assert!(tensors.values().all(|tensor| !tensor.track_op()));
    let folded = Net::new(VarBuilder::from_tensors(tensors, DType::F64, CPU));
    let x = input(DType::F64);
    let (here, there) = (
        flat64(&net.forward(&x).unwrap()),
        flat64(&folded.forward(&x).unwrap()),
    );
    let size = here.iter().fold(0f64, |max, x| max.max(x.abs()));
    // Five layers of sums of at most 150 products, whose terms are at most 1/EPSILON^(1/4) times their sums here.
    let bound = 5. * 150. * size * f64::EPSILON.powf(0.75);
    assert_eq!(here.len(), there.len());
    for (a, b) in here.iter().zip(&there) {
        assert!((a - b).abs() <= bound, "{a} {b}");
    }
    // After folding the batch norms no longer scale.
    assert_ne!(
        flat64(folded.stem.conv.weight()),
        flat64(net.stem.conv.weight())
    );
    for norm in [
        &folded.stem.bn,
        &folded.stem.norm,
        &folded.bn_up,
        &folded.bn_fc,
    ] {
        let (weight, bias) = norm.weight_and_bias().unwrap();
        assert!(flat64(weight).iter().all(|w| *w == 1.) && flat64(bias).iter().all(|b| *b == 0.));
    }
    // A bias moves into the layer's bias; without one it stays in the batch norm.
    assert!(
        flat64(folded.stem.norm.running_mean())
            .iter()
            .all(|m| *m == 0.)
    );
    assert!(
        flat64(folded.stem.bn.running_mean())
            .iter()
            .any(|m| *m != 0.)
    );
}

/// What [`nn::fuse_batch_norm`] makes of a pair, to the bit.
#[test]
fn weights_are_those_of_a_fused_pair() {
    let net = Net::trained(DType::F32);
    let tensors = fold_batch_norms(&net, &Net::pairs()).unwrap();
    let fused = nn::fuse_batch_norm(&net.stem.depthwise, &net.stem.norm).unwrap();
    assert_eq!(
        flat64(&tensors["stem.depthwise.weight"]),
        flat64(fused.weight())
    );
    assert_eq!(
        flat64(&tensors["stem.depthwise.bias"]),
        flat64(fused.bias().unwrap())
    );
    let fused = nn::fuse_batch_norm(&net.stem.conv, &net.stem.bn).unwrap();
    assert_eq!(flat64(&tensors["stem.conv.weight"]), flat64(fused.weight()));
    let shift = flat64(&tensors["stem.bn.running_mean"].neg().unwrap());
    assert_eq!(shift, flat64(fused.bias().unwrap()));
    // Layers that no pair names are unchanged.
    assert_eq!(
        flat64(&tensors["head.weight"]),
        flat64(&net.head.weight().unwrap())
    );
    // One call of the toolkit takes two here.
    let folded = Net::new(VarBuilder::from_tensors(tensors, DType::F32, CPU));
    let options = PrepareOptions::default().with_convolutions(true);
    let x = input(DType::F32);
    let quantized = quantize_model(&folded, PtqScheme::E4m3, &options, || folded.forward(&x));
    assert!(quantized.is_ok());
}

#[test]
fn what_cannot_be_folded_is_named() {
    let net = Net::trained(DType::F32);
    let error = |pairs: &[(&str, &str)]| fold_batch_norms(&net, pairs).unwrap_err();
    let unknown = error(&[("stem.conf", "stem.bn")]);
    assert!(
        matches!(&unknown, Error::Config(fp8_recipes::config::ConfigError::UnmatchedPattern { near, .. }) if near[0] == "stem.conv")
    );
    let unknown = error(&[("stem.conv", "stem.bm")]);
    assert!(
        matches!(&unknown, Error::Config(fp8_recipes::config::ConfigError::UnmatchedPattern { near, .. }) if near[0] == "stem.bn")
    );
    let channels = error(&[("stem.conv", "bn_fc")]).to_string();
    assert!(
        channels.contains("16 features") && channels.contains("6 output"),
        "{channels}"
    );
    let twice = error(&[("stem.conv", "stem.bn"), ("up", "stem.bn")]).to_string();
    assert!(
        twice.contains("`up`") && twice.contains("another pair"),
        "{twice}"
    );
    // A layer that the model has twice, and a weight with a second use.
    let net = Net::trained(DType::F32);
    let again = (net.fc.clone(), &net);
    let refused = fold_batch_norms(&again, &[("fc", "bn_fc")])
        .unwrap_err()
        .to_string();
    assert!(refused.contains("`fc` occurs twice"), "{refused}");
    let tied = nn::Linear::new(net.fc.weight().unwrap(), None).with_path("tied");
    let refused = fold_batch_norms(&(tied, &net), &[("fc", "bn_fc")])
        .unwrap_err()
        .to_string();
    assert!(refused.contains("used elsewhere"), "{refused}");
    // Not in one part of the model, or not next to each other.
    assert!(adjacent_batch_norms(&(&net.fc, &net.stem.bn)).is_empty());
    let add = nn::Add::new("sum");
    assert!(adjacent_batch_norms(&(&net.fc, add, &net.bn_fc)).is_empty());
}
