//! Casts and what keeps their results: FP8 tensors, fake quantization, cached and packed weights, the state of delayed scaling.

mod division;
mod every_value;
mod fake_quantize;
mod packed;
#[path = "../common/row.rs"]
mod row;
mod served;
mod stale_weights;
mod state;
mod tensor;
mod weight_cache;
