//! The scheme under which a file stores a calibrated layer.

use super::options::Ragged;
use crate::FilesError;
use crate::autocast::Calibration;
use crate::error::Result;
use fp8_core::{Format, Granularity};
use fp8_files::scheme::{InputScheme, LayerScheme};

/// Advice for a layer whose features cannot be cut into groups.
pub(super) const WAY_OUT: &str = "leave it in high precision by `PrepareOptions::with_off`, or choose what becomes of it by \
     `ExportOptions::with_ragged`";

/// The scheme of a layer with this calibration and these sizes; `None` if the layer stays in high precision.
pub(super) fn calibrated(
    calibration: &Calibration,
    sizes: (usize, usize),
    path: &str,
    ragged: Ragged,
) -> Result<Option<LayerScheme>> {
    let Calibration { input, weight, .. } = calibration;
    if input.is_disabled() || weight.is_disabled() {
        return Ok(None);
    }
    let refused = |reason: String| FilesError::NotExportable {
        path: path.to_string(),
        reason,
    };
    for (what, cast) in [("inputs were", input), ("weight was", weight)] {
        let format = cast.format.unwrap_or(Format::E4M3);
        if format != Format::E4M3 {
            let reason = format!("its {what} calibrated in {format}, the file holds e4m3 scales");
            return Err(refused(reason).into());
        }
    }
    let input = match input.granularity {
        Granularity::Tensorwise => InputScheme::Static(()),
        Granularity::Rowwise => InputScheme::per_token(),
        Granularity::Blockwise { rows: 1, cols } => InputScheme::per_group(cols),
        Granularity::Mx => InputScheme::DynamicMx,
        other => {
            let reason = format!("inputs scaled {other} have no strategy: a block holds one token");
            return Err(refused(reason).into());
        }
    };
    let mut scheme = LayerScheme {
        weight: weight.granularity,
        input,
    };
    match (scheme.is_ragged(sizes), ragged) {
        (false, _) | (true, Ragged::Refuse) => scheme.check(sizes, path, WAY_OUT)?,
        (true, Ragged::HighPrecision) => return Ok(None),
        (true, Ragged::Rowwise) => {
            scheme = LayerScheme {
                weight: Granularity::Rowwise,
                input: InputScheme::per_token(),
            };
        }
    }
    let rounded = calibration.round_scales_to_power_of_two;
    scheme.input = scheme.input.with_power_of_two(rounded);
    Ok(Some(scheme))
}
