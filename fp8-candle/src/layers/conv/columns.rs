//! Casts with scales along the sums: columns are cast part by part, and observers see the cast of one tensor.

use super::values::{Uncast, Values, kept_block};
use crate::base::data::storage::tensor_of;
use crate::base::data::window::{Part, Window};
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::replay::Replay;
use crate::cast::spec::{Observers, ScaleSource};
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::unfolding;
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::Granularity;

/// The columns of images for one product.
pub(super) struct Columns<'a> {
    images: &'a Values,
    window: &'a Window,
    /// Which dimension of the columns the product sums over.
    contraction: Contraction,
    /// Only of uncast images.
    casts: Vec<Piece>,
}

/// The cast of one part.
struct Piece {
    /// If a hook wants to see them.
    values: Option<Tensor>,
    quantized: Quantized,
}

impl<'a> Columns<'a> {
    pub(super) fn new(images: &'a Values, window: &'a Window, contraction: Contraction) -> Self {
        Self {
            images,
            window,
            contraction,
            casts: vec![],
        }
    }

    /// Bytes of one column's element while it is made and multiplied.
    pub(super) fn element_bytes(&self) -> usize {
        match self.images {
            Values::Fp8(_) => 1,
            Values::HighPrecision(_) => 4,
            Values::Uncast(images) => {
                images.x.dtype().size_in_bytes() + 1 + if images.emulate { 4 } else { 0 }
            }
        }
    }

    /// Parts have to end at multiples of this in the dimension that the product keeps, or where a group ends; then they have
    /// the scales of the whole. `None`: they cannot be cut there.
    pub(super) fn kept_block(&self) -> Option<usize> {
        match self.images {
            Values::Uncast(Uncast { quantizer, .. }) => match quantizer.source {
                ScaleSource::Fixed { .. } => None,
                _ => Some(kept_block(quantizer.spec.granularity)),
            },
            _ => Some(1),
        }
    }

    /// Whether scales may run across the images of the batch.
    pub(super) fn needs_whole_sums(&self) -> bool {
        matches!(self.images, Values::Uncast(_)) && self.contraction == Cols
    }

    /// `[channels * taps, images * places]` of a part.
    pub(super) fn part(&mut self, part: &Part) -> Result<Values> {
        let (images, window) = (self.images, self.window);
        let elements = images.elements();
        let columns = if window.is_single() && part.images.len() == 1 {
            let image = elements.narrow(0, part.images.start, 1)?;
            let image = image.narrow(1, part.channels.start, part.channels.len())?;
            image.contiguous()?.reshape(window.columns(part))?
        } else {
            unfolding(elements.device()).unfold(elements, window, part)?
        };
        let Values::Uncast(uncast) = images else {
            return images.with(columns);
        };
        let of = &uncast.quantizer;
        let observers = &of.observers;
        let replays = of.replay.as_ref().and_then(Replay::peek).is_some();
        let quantizer = Quantizer {
            observers: Observers::default(),
            ..of.clone()
        };
        let quantized = quantizer.quantize(&columns, self.contraction)?;
        let values = Values::Fp8(quantized.tensor.clone());
        if !observers.is_empty() && !replays {
            self.casts.push(Piece {
                values: observers.hook.is_some().then_some(columns),
                quantized,
            });
        }
        match uncast.emulate {
            true => values.emulated(),
            false => Ok(values),
        }
    }

    /// Notifies the observers of the cast of these images. Parts come in the order of the dimension that the product keeps.
    pub(super) fn finish(self) -> Result<()> {
        let (Values::Uncast(Uncast { quantizer, .. }), Some(first)) =
            (self.images, self.casts.first())
        else {
            return Ok(());
        };
        let amaxes = self.casts.iter().filter_map(|cast| {
            let amax = cast.quantized.amax.as_ref()?;
            Some(amax.flatten_all())
        });
        let amaxes = amaxes.collect::<candle_core::Result<Vec<_>>>()?;
        let amax = match amaxes.is_empty() || quantizer.observers.recorder.is_none() {
            true => None,
            false => Some(Tensor::cat(&amaxes, 0)?),
        };
        let is_delayed = quantizer.source.is_delayed();
        quantizer
            .observers
            .count_and_record(amax.as_ref(), is_delayed)?;
        let Some(hook) = &quantizer.observers.hook else {
            return Ok(());
        };
        let (dim, block) = (self.kept_dim(), kept_block(quantizer.spec.granularity));
        let (_, ends) = self.casts.split_last().unwrap_or((first, &[]));
        let fits = |cast: &Piece| cast.quantized.tensor.dims()[dim].is_multiple_of(block);
        if self.casts.len() > 1 && ends.iter().all(fits) {
            let (x, quantized) = self.together(dim, &first.quantized)?;
            return hook.on_cast(&x, &quantized);
        }
        // Scales of blocks that end with a group do not form a grid of the whole tensor.
        for cast in &self.casts {
            if let Some(x) = &cast.values {
                hook.on_cast(x, &cast.quantized)?;
            }
        }
        Ok(())
    }

    fn kept_dim(&self) -> usize {
        match self.contraction {
            Cols => 0,
            Rows => 1,
        }
    }

    /// The casts of all parts as one. Each part has its own key for stochastic rounding; the cast shows the key of the first
    /// part.
    fn together(&self, dim: usize, first: &Quantized) -> Result<(Tensor, Quantized)> {
        let cat = |of: &dyn Fn(&Piece) -> Option<Tensor>| -> Result<Tensor> {
            let parts: Vec<_> = self.casts.iter().filter_map(of).collect();
            Ok(Tensor::cat(&parts, dim)?)
        };
        let grid_of = |cast: &Piece, x: &Tensor| {
            let grid = cast.quantized.tensor.grid();
            x.reshape((grid.scale_rows(), grid.scale_cols())).ok()
        };
        let codes = cat(&|cast| Some(cast.quantized.tensor.codes().clone()))?;
        let dequant_scale = cat(&|cast| Some(cast.quantized.tensor.dequant_scale().clone()))?;
        let quant_scale = cat(&|cast| grid_of(cast, &cast.quantized.quant_scale))?;
        let amax = match &first.amax {
            None => None,
            Some(_) => Some(cat(&|cast| grid_of(cast, cast.quantized.amax.as_ref()?))?),
        };
        let (format, granularity) = (first.tensor.format(), first.tensor.granularity());
        let contraction = self.contraction;
        let quantized = Quantized {
            tensor: Fp8Tensor::from_parts(codes, format, granularity, contraction, dequant_scale)?,
            quant_scale,
            amax,
            cast: first.cast,
        };
        Ok((cat(&|cast| cast.values.clone())?, quantized))
    }
}

/// Images of one tap, cast as a whole before they are multiplied: their values, for sums and both backward products. Images
/// with one scale stay codes.
pub(super) fn settled(
    x: &Tensor,
    quantizer: &Quantizer,
    maps: &Window,
    groups: usize,
) -> Result<Values> {
    let images = Values::images(&x.reshape(maps.dims().as_slice())?, quantizer)?;
    if quantizer.spec.granularity == Granularity::Tensorwise {
        return Ok(images);
    }
    let images = images.emulated()?;
    let mut out = unfolding(x.device()).images(maps, DType::F32, x.device())?;
    let mut columns = Columns::new(&images, maps, Rows);
    let per_group = maps.channels / groups;
    for group in (0..groups).filter(|_| maps.batch > 0) {
        let part = Part {
            images: 0..maps.batch,
            channels: group * per_group..(group + 1) * per_group,
        };
        out.fold(columns.part(&part)?.elements(), maps, &part, None)?;
    }
    columns.finish()?;
    let values = tensor_of(out.finish()?, maps.dims().as_slice())?;
    Ok(Values::HighPrecision(values))
}
