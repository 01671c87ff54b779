//! The cases of `scalify_ops`.

use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::Scaled;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

pub struct Golden {
    pub cases: Vec<Case>,
}

#[derive(Clone)]
pub struct Case {
    pub key: String,
    pub op: String,
    /// The dtype of a cast.
    pub to: Option<String>,
    pub inputs: Vec<Value>,
    pub outputs: Vec<Value>,
}

#[derive(Clone)]
pub enum Value {
    Pair(Pair),
    Plain(Array),
}

#[derive(Clone)]
pub struct Pair {
    pub data: Array,
    pub scale: f64,
}

/// Numbers of any dtype; U8 codes for FP8, with their decoded values.
#[derive(Clone)]
pub struct Array {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub numbers: Vec<f64>,
}

impl Value {
    pub fn dtype(&self) -> DType {
        match self {
            Self::Pair(pair) => pair.data.dtype,
            Self::Plain(array) => array.dtype,
        }
    }
}

impl Pair {
    pub fn scaled(&self) -> Result<Scaled> {
        let Array {
            dtype,
            dims,
            numbers,
        } = &self.data;
        let data = Tensor::from_vec(numbers.clone(), dims.as_slice(), &Device::Cpu)?;
        Scaled::from_parts(&data.to_dtype(*dtype)?, self.scale as f32)
    }
}

impl Golden {
    pub fn read() -> Self {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/scalify_ops");
        let json = std::fs::read(format!("{dir}.json")).unwrap();
        let json: Json = serde_json::from_slice(&json).unwrap();
        let bytes = std::fs::read(format!("{dir}.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let text = |x: &Json| x.as_str().map(str::to_owned);
        let cases = json["cases"].as_array().unwrap().iter().map(|case| {
            let key = text(&case["key"]).unwrap();
            let values = |list: &str, short: &str| -> Vec<Value> {
                (case[list].as_array().unwrap().iter().enumerate())
                    .map(|(i, meta)| value(&tensors, &format!("{key}.{short}{i}"), meta))
                    .collect()
            };
            Case {
                op: text(&case["op"]).unwrap(),
                to: text(&case["to"]),
                inputs: values("inputs", "in"),
                outputs: values("outputs", "out"),
                key,
            }
        });
        Self {
            cases: cases.collect(),
        }
    }
}

fn value(tensors: &SafeTensors<'_>, name: &str, meta: &Json) -> Value {
    let data = array(tensors, &format!("{name}.data"), &meta["data"]);
    match meta["kind"].as_str() {
        Some("scaled") => Value::Pair(Pair {
            data,
            scale: array(tensors, &format!("{name}.scale"), &meta["scale"]).numbers[0],
        }),
        _ => Value::Plain(data),
    }
}

fn array(tensors: &SafeTensors<'_>, name: &str, meta: &Json) -> Array {
    let view = tensors.tensor(name).unwrap();
    let (dims, size) = (&meta[1], |size: &Json| size.as_u64().unwrap() as usize);
    let words = || {
        view.data()
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    let fours = || {
        view.data()
            .chunks_exact(4)
            .map(|b| [b[0], b[1], b[2], b[3]])
    };
    let codes = |format: Format| {
        view.data()
            .iter()
            .map(move |&code| format.decode(code).into())
    };
    let (dtype, numbers): (DType, Vec<f64>) = match (meta[0].as_str().unwrap(), view.dtype()) {
        ("float32", Dtype::F32) => (
            DType::F32,
            fours().map(|b| f32::from_le_bytes(b).into()).collect(),
        ),
        ("int32", Dtype::I32) => (
            DType::I64,
            fours().map(|b| i32::from_le_bytes(b).into()).collect(),
        ),
        ("float16", Dtype::F16) => (
            DType::F16,
            words().map(|bits| f16::from_bits(bits).to_f64()).collect(),
        ),
        ("bfloat16", Dtype::U16) => (
            DType::BF16,
            words().map(|bits| bf16::from_bits(bits).to_f64()).collect(),
        ),
        ("float8_e4m3fn", Dtype::U8) => (DType::U8, codes(Format::E4M3).collect()),
        ("float8_e5m2", Dtype::U8) => (DType::U8, codes(Format::E5M2).collect()),
        ("bool", Dtype::U8) => (
            DType::U8,
            view.data().iter().map(|&bit| bit.into()).collect(),
        ),
        other => panic!("{name}: {other:?}"),
    };
    Array {
        dtype,
        // Scalars are stored with one dimension.
        dims: dims.as_array().unwrap().iter().map(size).collect(),
        numbers,
    }
}
