//! Which axis of a mesh divides which dimension of a linear layer.

use crate::error::{LayerError, Result};
use candle_core::Tensor;
use fp8_candle::{LayerShards, Shards};
use fp8_ranks::{DeviceMesh, ProcessGroup};
use std::fmt;

/// The axes of a [`DeviceMesh`] that divide the dimensions of a linear layer; None leaves a dimension whole on every rank.
///
/// x `[batch, input]` times weight `[output, contracted]` is y `[batch, output]`. `input` and `contracted` have the same features, but
/// the part of x that a rank gets may differ from the part of the weight that it holds. No axis divides two dimensions of
/// one tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearAxes {
    /// Rows of x and y: the tokens.
    pub batch: Option<String>,
    /// Features of x, as they come.
    pub input: Option<String>,
    /// Input features of the weight.
    pub contracted: Option<String>,
    /// Features of y, and output features of weight and bias.
    pub output: Option<String>,
}

impl LinearAxes {
    /// A layer that every rank has whole.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same axes, with another axis for the tokens.
    pub fn with_batch(self, axis: impl Into<String>) -> Self {
        Self {
            batch: Some(axis.into()),
            ..self
        }
    }

    /// The same axes, with another axis for the features of x.
    pub fn with_input(self, axis: impl Into<String>) -> Self {
        Self {
            input: Some(axis.into()),
            ..self
        }
    }

    /// The same axes, with another axis for the weight's input features.
    pub fn with_contracted(self, axis: impl Into<String>) -> Self {
        Self {
            contracted: Some(axis.into()),
            ..self
        }
    }

    /// The same axes, with another axis for the output features.
    pub fn with_output(self, axis: impl Into<String>) -> Self {
        Self {
            output: Some(axis.into()),
            ..self
        }
    }

    /// This rank's part of a whole weight `[out_features, in_features]`.
    ///
    /// # Errors
    /// [`LayerError::Axes`] for an unknown axis, or a dimension that it does not divide.
    pub fn part_of_weight(&self, weight: &Tensor, mesh: &DeviceMesh) -> Result<Tensor> {
        let rows = self.part(weight, 0, &self.output, mesh)?;
        self.part(&rows, 1, &self.contracted, mesh)
    }

    /// This rank's part of a whole bias `[out_features]`.
    ///
    /// # Errors
    /// As [`LinearAxes::part_of_weight`].
    pub fn part_of_bias(&self, bias: &Tensor, mesh: &DeviceMesh) -> Result<Tensor> {
        self.part(bias, 0, &self.output, mesh)
    }

    fn part(
        &self,
        x: &Tensor,
        dim: usize,
        axis: &Option<String>,
        mesh: &DeviceMesh,
    ) -> Result<Tensor> {
        let Some(group) = self.group("", axis, mesh)? else {
            return Ok(x.clone());
        };
        let (len, ranks) = (x.dim(dim)?, group.size());
        if !len.is_multiple_of(ranks) {
            let problem =
                format!("a dimension of {len} cannot be divided evenly over {ranks} ranks");
            return Err(self.problem("", problem));
        }
        let part = len / ranks;
        Ok(x.narrow(dim, group.rank() * part, part)?.contiguous()?)
    }

    pub(super) fn problem(&self, path: &str, problem: impl Into<String>) -> crate::Error {
        LayerError::Axes {
            path: path.into(),
            axes: self.to_string(),
            problem: problem.into(),
        }
        .into()
    }

    /// The ranks along an axis.
    pub(super) fn group(
        &self,
        path: &str,
        axis: &Option<String>,
        mesh: &DeviceMesh,
    ) -> Result<Option<ProcessGroup>> {
        let Some(axis) = axis else { return Ok(None) };
        match mesh.axis(axis) {
            Some(group) => Ok(Some(group.clone())),
            None => {
                let names: Vec<&str> = mesh.names().collect();
                let problem = format!("the mesh has no axis `{axis}`, but {}", names.join(", "));
                Err(self.problem(path, problem))
            }
        }
    }

    /// Checks that no axis divides two dimensions of one tensor.
    pub(super) fn check(&self, path: &str) -> Result<()> {
        let tensors = [
            ("x", &self.batch, &self.input),
            ("the weight", &self.output, &self.contracted),
            ("y", &self.batch, &self.output),
        ];
        for (tensor, a, b) in tensors {
            if let (Some(a), Some(b)) = (a, b)
                && a == b
            {
                let problem = format!("axis `{a}` divides two dimensions of {tensor}");
                return Err(self.problem(path, problem));
            }
        }
        Ok(())
    }

    /// Whether the other input features of the weight are on ranks with other rows of x; the weight is then gathered for the product.
    pub(super) fn gathers_weight(&self) -> bool {
        self.contracted.is_some() && self.contracted == self.batch
    }

    /// The axis along which ranks hold summands of the product.
    pub(super) fn summed(&self) -> &Option<String> {
        match self.gathers_weight() {
            true => &None,
            false => &self.contracted,
        }
    }

    /// The parts of the operands as they are cast. All ranks of the mesh call it.
    pub(super) fn shards(&self, path: &str, mesh: &DeviceMesh) -> Result<LayerShards> {
        let shards = |rows: &Option<String>, cols: &Option<String>| -> Result<Shards> {
            // An unknown axis is an error of this layer.
            self.group(path, rows, mesh)?;
            self.group(path, cols, mesh)?;
            let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
            let cols: Vec<&str> = cols.iter().map(String::as_str).collect();
            super::shards::shards(mesh, &rows, &cols)
        };
        let summed = self.summed();
        Ok(LayerShards::new(
            shards(&self.batch, summed)?,
            shards(&self.output, summed)?,
            shards(&self.batch, &self.output)?,
        ))
    }
}

impl fmt::Display for LinearAxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = [
            ("batch", &self.batch),
            ("input", &self.input),
            ("contracted", &self.contracted),
            ("output", &self.output),
        ];
        let mut first = true;
        for (dim, axis) in dims {
            if let Some(axis) = axis {
                let comma = if std::mem::take(&mut first) { "" } else { ", " };
                write!(f, "{comma}{dim} over `{axis}`")?;
            }
        }
        if first {
            f.write_str("no axes")?;
        }
        Ok(())
    }
}
