//! Fine-tuning: all weights of a checkpoint, FP8 or plain, or adapters on a frozen FP8 base; steps of several micro-batches.

mod accumulation;
mod adapters;
mod dequantize;
mod families;
mod flow;
mod support;
