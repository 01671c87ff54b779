//! The casts of a training step of a net of convolutions.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_core::{Format, Overflow, Rounding};
use fp8::nn::{self, BatchNorm, Conv2d, Conv2dConfig, ConvTranspose2d, Linear, ModuleT};
use fp8::{
    Autocast, CastObserver, Fp8Module, LayerKind, PrepareOptions, RecipeName, fp8_autocast,
    prepare_fp8,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

#[derive(Fp8Module)]
struct Net {
    first: Conv2d,
    norm: BatchNorm,
    grouped: Conv2d,
    up: ConvTranspose2d,
    head: Linear,
}

impl Net {
    fn new(vars: &VarMap) -> Result<Self> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
        let padded = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        let strided = Conv2dConfig {
            stride: 2,
            groups: 2,
            ..padded
        };
        Ok(Self {
            first: nn::conv2d(1, 4, 3, padded, vb.pp("first"))?,
            norm: nn::batch_norm(4, 1e-5, vb.pp("norm"))?,
            grouped: nn::conv2d_no_bias(4, 8, 3, strided, vb.pp("grouped"))?,
            up: nn::conv_transpose2d(8, 2, 3, Default::default(), vb.pp("up"))?,
            head: nn::linear(2 * 6 * 6, 3, vb.pp("head"))?,
        })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward_t(&self.first.forward(x)?, true)?.relu()?;
        let x = self.up.forward(&self.grouped.forward(&x)?.relu()?)?;
        self.head.forward(&x.flatten_from(1)?)?.sqr()?.mean_all()
    }
}

type Casts = BTreeMap<(String, String), (usize, Format, &'static str, Overflow)>;

fn observed(recipe: RecipeName) -> Casts {
    let vars = VarMap::new();
    let net = Net::new(&vars).unwrap();
    let options = PrepareOptions::default().with_operators(true);
    let report = prepare_fp8(&net, &options).unwrap();
    assert_eq!(report.get("grouped").unwrap().kind, LayerKind::Convolution);
    let casts = Arc::new(Mutex::new(Casts::new()));
    let list = casts.clone();
    let observer = CastObserver::new(move |event| {
        let rounding = match event.cast.rounding {
            Rounding::NearestEven => "nearest",
            Rounding::Stochastic(_) => "stochastic",
            _ => "other",
        };
        let key = (event.path.to_string(), event.operand.to_string());
        let entry = (0, event.cast.format, rounding, event.cast.overflow);
        list.lock().unwrap().entry(key).or_insert(entry).0 += 1;
    });
    let x = Tensor::randn(0f32, 1., (2, 1, 8, 8), &Device::Cpu).unwrap();
    let guard = fp8_autocast(Autocast::new(recipe).with_cast_observer(&observer)).unwrap();
    let loss = net.loss(&x).unwrap();
    guard.close().unwrap();
    loss.backward().unwrap();
    let casts = casts.lock().unwrap();
    casts.clone()
}

fn expected(forward: Format, overflow: Overflow) -> Casts {
    let mut casts = Casts::new();
    // Batch norm stays in high precision.
    for layer in ["first", "grouped", "up", "head"] {
        for tensor in ["weight", "input", "output"] {
            let cast = (1, forward, "nearest", overflow);
            casts.insert((layer.into(), tensor.into()), cast);
        }
        for tensor in ["grad_output", "grad_input", "grad_weight"] {
            // The images need no gradient.
            if (layer, tensor) != ("first", "grad_input") {
                let cast = (1, Format::E5M2, "stochastic", Overflow::NonFinite);
                casts.insert((layer.into(), tensor.into()), cast);
            }
        }
    }
    casts
}

#[test]
fn direct_casts_six_tensors_of_each_layer() {
    let expected = expected(Format::E5M2, Overflow::NonFinite);
    assert_eq!(observed(RecipeName::Direct), expected);
}

#[test]
fn hybrid_casts_six_tensors_of_each_layer() {
    let expected = expected(Format::E4M3, Overflow::Saturate);
    assert_eq!(observed(RecipeName::Hybrid), expected);
}

/// Named recipes cast the operands of convolutions, and no results.
#[test]
fn named_recipes_work_on_convolutions() {
    for recipe in RecipeName::ALL {
        if [RecipeName::Direct, RecipeName::Hybrid].contains(&recipe) {
            continue;
        }
        let casts = observed(recipe);
        for layer in ["first", "grouped", "up", "head"] {
            let cast = |tensor: &str| casts.get(&(layer.to_string(), tensor.to_string()));
            assert!(
                cast("input").is_some() && cast("weight").is_some(),
                "{recipe}: {casts:?}"
            );
            // The images need no gradient.
            let wanted = layer != "first";
            assert_eq!(cast("grad_output").is_some(), wanted, "{recipe}: {casts:?}");
            assert!(
                cast("output").is_none() && cast("grad_weight").is_none(),
                "{recipe}"
            );
        }
    }
}
