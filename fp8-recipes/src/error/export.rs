//! Errors of calibration and export.

use std::path::PathBuf;

/// Why a model cannot be quantized or exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The weight of a layer has changed since its calibration.
    #[error(
        "layer `{path}`: the weight has changed since calibration, so its scales no longer fit: calibrate again"
    )]
    ChangedSinceCalibration {
        /// Path of the layer.
        path: String,
    },
    /// A layer was not calibrated.
    #[error(
        "layer `{path}` was not calibrated: run at least one batch through it under a calibrating guard"
    )]
    NotCalibrated {
        /// Path of the layer.
        path: String,
    },
    /// The target is a file whose name does not end in `.safetensors`.
    #[error(
        "{path} is not a directory: an exported model goes into one, or to a name that ends in .safetensors"
    )]
    Target {
        /// The path as given.
        path: PathBuf,
    },
    /// The directory holds another model, in shards: whoever opens it follows their index and does not see the exported file.
    #[error(
        "{index} is the index of another model, and programs that open the directory follow it: export to another directory, or remove that model"
    )]
    Sharded {
        /// The index of the shards.
        index: PathBuf,
    },
    /// The model does not show all of its parameters.
    #[error(
        "the model has parameters that it does not show, so they would be missing in the file: {}. \
        Fields with `#[fp8(skip)]` must hold no parameters", .names.join(", ")
    )]
    MissedParameters {
        /// Names of the parameters.
        names: Vec<String>,
    },
    /// The model has no FP8 layers to export.
    #[error("no layer of the model is prepared for FP8: nothing to export")]
    NothingToExport,
    /// The model has no linear layer or convolution to quantize.
    #[error("no layer of the model was prepared for FP8: nothing to quantize")]
    NothingToQuantize,
}
