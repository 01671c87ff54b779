//! Layers: the FP8 linear layer, conversion of models to it, and what other libraries computed.

mod conversion;
mod goldens;
mod linear;
