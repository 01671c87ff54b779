//! Norms over the values of a channel or of a group of channels.

use super::error::{Result, shape};
use super::value::Scaled;
use candle_core::Tensor;

impl Scaled {
    /// Batch normalization in training, `[batch, channels, ..]`: each channel over the batch and what follows, with `gain` and `bias`
    /// `[channels]`. Scale: as that of [`Scaled::layer_norm`], 1 without a gain. Without `center` the mean stays.
    ///
    /// # Errors
    /// If there is no channel dimension, or `gain` or `bias` are not `[channels]`.
    pub fn batch_norm(
        &self,
        center: bool,
        gain: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let channels = self.channels("batch_norm")?;
        let by_channel = self.transpose(0, 1)?;
        let dims = by_channel.dims().to_vec();
        let rows = by_channel.reshape(&[channels, dims[1..].iter().product()])?;
        let normal = rows.normalized(center, eps)?;
        let normal = normal.reshape(&dims)?.transpose(0, 1)?;
        normal.with_gain("batch_norm", gain, bias)
    }

    /// Group normalization, `[batch, channels, ..]`: each of `groups` equal parts of the channels of an image, with `gain` and `bias`
    /// `[channels]`. Scale: as that of [`Scaled::layer_norm`].
    ///
    /// # Errors
    /// If there is no channel dimension, `groups` does not divide it, or `gain` or `bias` are not `[channels]`.
    pub fn group_norm(
        &self,
        groups: usize,
        gain: &Self,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let op = "group_norm";
        let channels = self.channels(op)?;
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(shape(
                op,
                "the input",
                format!("channels that {groups} groups divide"),
                self.dims(),
            ));
        }
        let count: usize = self.dims()[1..].iter().product();
        let rows = self.reshape(&[self.dims()[0] * groups, count / groups])?;
        let normal = rows.normalized(true, eps)?.reshape(self.dims())?;
        normal.with_gain(op, Some(gain), bias)
    }

    fn channels(&self, op: &'static str) -> Result<usize> {
        match self.dims() {
            [_, channels, ..] => Ok(*channels),
            dims => Err(shape(op, "the input", "[batch, channels, ..]", dims)),
        }
    }

    /// The last dimension normalized, with a scale of 1.
    fn normalized(&self, center: bool, eps: f64) -> Result<Self> {
        let len = self.dims().last().copied().unwrap_or(0);
        let ones = Tensor::ones(len, self.compute_dtype(), self.device())?;
        let ones = Self::from_parts(&ones, 1.0)?;
        match center {
            true => self.layer_norm(&ones, None, eps),
            false => self.rms_norm(&ones, eps),
        }
    }

    /// Times `gain` plus `bias`, each along the channels.
    fn with_gain(
        &self,
        op: &'static str,
        gain: Option<&Self>,
        bias: Option<&Self>,
    ) -> Result<Self> {
        let channels = self.channels(op)?;
        let along = |what: &'static str, x: &Self| -> Result<Self> {
            if x.dims() != [channels] {
                return Err(shape(
                    op,
                    what,
                    format!("[{channels}], one for each channel"),
                    x.dims(),
                ));
            }
            let mut dims = vec![1; self.rank()];
            dims[1] = channels;
            x.reshape(&dims)
        };
        let y = match gain {
            Some(gain) => self.mul(&along("the gain", gain)?)?,
            None => self.clone(),
        };
        match bias {
            Some(bias) => y.add(&along("the bias", bias)?),
            None => Ok(y),
        }
    }
}
