//! What a search is asked for.

use crate::models::error::Result;
use crate::rewrite::{QuantizeOptions, Source};
use fp8_candle::InputScaling;
use fp8_files::contents::Described;
use fp8_files::search::SearchOptions;
use std::collections::BTreeMap;

/// What is searched.
pub(super) struct Task<'a> {
    /// The files of the model.
    pub(super) source: &'a dyn Source,
    /// How they are quantized.
    pub(super) options: &'a QuantizeOptions,
    pub(super) search: &'a SearchOptions,
    /// The layers to search, by path: how each is stored, and how its inputs are cast.
    pub(super) wanted: BTreeMap<String, (Described, InputScaling)>,
}

impl<'a> Task<'a> {
    /// The task for these layers, with the static scales of their inputs if they have such.
    pub(super) fn new(
        source: &'a dyn Source,
        options: &'a QuantizeOptions,
        search: &'a SearchOptions,
        layers: Vec<Described>,
    ) -> Result<Self> {
        let layers = layers.into_iter().map(|layer| {
            let input = options.input_scaling(&layer)?;
            Ok((layer.path.clone(), (layer, input)))
        });
        Ok(Self {
            source,
            options,
            search,
            wanted: layers.collect::<Result<_>>()?,
        })
    }
}
