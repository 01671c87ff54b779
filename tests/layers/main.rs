//! Layers: the FP8 linear layer, conversion of models, and results of other libraries.

mod conversion;
mod goldens;
mod linear;
