//! Adapters of low rank beside the layers of models, and their files.

mod goldens;
mod merged;
mod refused;
mod several;
mod support;
mod training;
mod twice;
