//! Writes one checkpoint as another, a few layers at a time: a whole model is never in memory.
//!
//! | function | from | to |
//! |---|---|---|
//! | [`quantize`] | high precision (or FP8, dequantized) | FP8 by a [`Scheme`], written in a [`Spelling`] |
//! | [`convert`] | FP8 of any family | the same codes and scales in another [`Spelling`] |
//! | [`dequantize`] | FP8 of any family | an ordinary checkpoint |
//!
//! All three read a [`Source`], such as a [`Checkpoint`](crate::load::Checkpoint), one with an adapter added to it ([`Merged`]) or one with
//! outliers moved ([`Shifted`]), and write a directory that appears complete or not at all. A callback gets the [`Progress`] and can cancel.

mod card;
mod classes;
mod companions;
mod convert;
mod dequantize;
mod directory;
mod job;
mod layer;
mod merged;
mod options;
mod pipeline;
mod positioned;
mod progress;
mod quantize;
mod scheme;
mod select;
mod shards;
mod shifted;
mod slabs;
mod source;
mod spelling;

pub use crate::spelling::Spelling;
pub use card::{CARD_FILE, Measure, ModelCard, Relation, hub_name};
pub use classes::Classifier;
pub use convert::convert;
pub use dequantize::dequantize;
pub use merged::Merged;
pub use options::{WriteOptions, WriteReport};
pub use progress::{OnProgress, Progress, quiet};
pub use quantize::{QuantizeOptions, layers_to_quantize, quantize};
pub use scheme::Scheme;
pub use shifted::Shifted;
pub use source::Source;
