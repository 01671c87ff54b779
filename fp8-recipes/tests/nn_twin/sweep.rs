//! Layers that compute as candle-nn's do: their gradients, too, are those of what they compute.

use super::{check, check_gelu, check_in_f32, wave};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{self, Activation, RNN, ops};

#[test]
fn activations() {
    use Activation::*;
    for activation in [
        Gelu,
        NewGelu,
        Relu,
        Relu2,
        Relu6,
        Silu,
        Sigmoid,
        HardSigmoid,
        Swiglu,
        Swish,
        Mish,
        HardSwish,
        Elu(0.7),
        LeakyRelu(0.1),
        GeluPytorchTanh,
    ] {
        let (what, x) = (format!("{activation:?}"), [wave(&[3, 8], 1)]);
        let apply = |x: &[Tensor]| x[0].apply(&activation);
        match activation {
            Gelu | NewGelu | GeluPytorchTanh => check_gelu(&what, &x, apply),
            _ => check(&what, &x, apply),
        }
    }
    let prelu = |x: &[Tensor]| nn::PReLU::new(x[1].clone(), false).forward(&x[0]);
    check("PReLU", &[wave(&[2, 3, 4], 1), wave(&[3], 2)], prelu);
}

#[test]
fn operations() {
    let x = || [wave(&[3, 8], 1)];
    type Op = fn(&Tensor) -> Result<Tensor>;
    let all: [(&str, Op); 8] = [
        ("softmax", |x| ops::softmax(x, 0)),
        ("log_softmax", |x| ops::log_softmax(x, 1)),
        ("silu", ops::silu),
        ("swiglu", ops::swiglu),
        ("sigmoid", ops::sigmoid),
        ("hard_sigmoid", ops::hard_sigmoid),
        ("mish", ops::mish),
        ("leaky_relu", |x| ops::leaky_relu(x, 0.2)),
    ];
    for (name, op) in all {
        check(name, &x(), |x| op(&x[0]));
    }
    // No step crosses the kink at 0.
    let apart = x().map(|x| (x.sign().unwrap() * (x.abs().unwrap() + 0.3).unwrap()).unwrap());
    check_in_f32("selu", &apart, |x| ops::selu(&x[0], 1.6, 1.05));
    let image = || [wave(&[2, 4, 4, 4], 1)];
    check("pixel_shuffle", &image(), |x| ops::pixel_shuffle(&x[0], 2));
    check("pixel_unshuffle", &image(), |x| {
        ops::pixel_unshuffle(&x[0], 2)
    });
    check("replication_pad2d", &image(), |x| {
        ops::replication_pad2d(&x[0], 1)
    });
}

#[test]
fn losses() {
    let pair = || [wave(&[3, 8], 1), wave(&[3, 8], 2)];
    check("mse", &pair(), |x| nn::loss::mse(&x[0], &x[1]));
    check("huber", &pair(), |x| nn::loss::huber(&x[0], &x[1], 0.6));
    let target = wave(&[3, 8], 3)
        .ge(0.)
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap();
    check("binary_cross_entropy", &[wave(&[3, 8], 1)], |x| {
        nn::loss::binary_cross_entropy_with_logit(&x[0], &target)
    });
    let target = Tensor::new(&[2u32, 0, 4], &Device::Cpu).unwrap();
    check("nll", &[wave(&[3, 8], 1)], |x| {
        nn::loss::nll(&x[0], &target)
    });
}

#[test]
fn convolutions() {
    for (padding, stride, dilation, groups) in [
        (0, 1, 1, 1),
        (1, 1, 1, 1),
        (1, 2, 1, 1),
        (2, 1, 2, 1),
        (1, 3, 1, 2),
        (0, 1, 1, 2),
    ] {
        let what =
            format!("padding {padding}, stride {stride}, dilation {dilation}, groups {groups}");
        let config = nn::Conv1dConfig {
            padding,
            stride,
            dilation,
            groups,
            cudnn_fwd_algo: None,
        };
        let inputs = [
            wave(&[2, 4, 9], 1),
            wave(&[6, 4 / groups, 3], 2),
            wave(&[6], 3),
        ];
        check(&format!("Conv1d, {what}"), &inputs, |x| {
            nn::Conv1d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        });
        let config = nn::Conv2dConfig {
            padding,
            stride,
            dilation,
            groups,
            cudnn_fwd_algo: None,
        };
        let inputs = [
            wave(&[2, 4, 7, 7], 1),
            wave(&[6, 4 / groups, 3, 3], 2),
            wave(&[6], 3),
        ];
        check(&format!("Conv2d, {what}"), &inputs, |x| {
            nn::Conv2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        });
    }
    for (padding, output_padding, stride, dilation, groups) in [
        (0, 0, 1, 1, 1),
        (1, 0, 2, 1, 1),
        (1, 1, 2, 1, 2),
        (0, 0, 1, 2, 1),
        (5, 2, 3, 2, 2),
    ] {
        let what = format!(
            "padding {padding}, {output_padding}, stride {stride}, dilation {dilation}, groups {groups}"
        );
        let config = nn::ConvTranspose1dConfig {
            padding,
            output_padding,
            stride,
            dilation,
            groups,
        };
        let inputs = [
            wave(&[2, 4, 5], 1),
            wave(&[4, 3, 3], 2),
            wave(&[3 * groups], 3),
        ];
        check(&format!("ConvTranspose1d, {what}"), &inputs, |x| {
            nn::ConvTranspose1d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        });
        let config = nn::ConvTranspose2dConfig {
            padding,
            output_padding,
            stride,
            dilation,
        };
        let inputs = [
            wave(&[2, 4, 5, 5], 1),
            wave(&[4, 3, 3, 3], 2),
            wave(&[3], 3),
        ];
        check(&format!("ConvTranspose2d, {what}"), &inputs, |x| {
            nn::ConvTranspose2d::new(x[1].clone(), Some(x[2].clone()), config).forward(&x[0])
        });
    }
}

#[test]
fn other_layers() {
    let inputs = [wave(&[2, 4, 3, 3], 1), wave(&[4], 2), wave(&[4], 3)];
    check("GroupNorm", &inputs, |x| {
        nn::GroupNorm::new(x[1].clone(), x[2].clone(), 4, 2, 1e-5)?.forward(&x[0])
    });
    for train in [true, false] {
        check(&format!("BatchNorm, train {train}"), &inputs, |x| {
            let (mean, var) = (wave(&[4], 4), wave(&[4], 5).affine(0.2, 1.)?);
            nn::BatchNorm::new(4, mean, var, x[1].clone(), x[2].clone(), 1e-5)?
                .forward_t(&x[0], train)
        });
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let lstm = nn::lstm(3, 4, Default::default(), vb.pp("lstm")).unwrap();
    let gru = nn::gru(3, 4, Default::default(), vb.pp("gru")).unwrap();
    check("LSTM", &[wave(&[2, 5, 3], 1)], |x| {
        lstm.states_to_tensor(&lstm.seq(&x[0])?)
    });
    check("GRU", &[wave(&[2, 5, 3], 1)], |x| {
        gru.states_to_tensor(&gru.seq(&x[0])?)
    });
    check("Embedding", &[wave(&[5, 3], 1)], |x| {
        let ids = Tensor::new(&[[1u32, 4], [4, 0]], &Device::Cpu)?;
        nn::Embedding::new(x[0].clone(), 3).forward(&ids)
    });
    check(
        "Linear",
        &[wave(&[2, 3, 4], 1), wave(&[5, 4], 2), wave(&[5], 3)],
        |x| nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]),
    );
}
