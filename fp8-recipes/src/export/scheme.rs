//! The scheme under which a file stores a calibrated layer.

use super::options::Ragged;
use crate::FilesError;
use crate::autocast::Calibration;
use crate::error::Result;
use fp8_core::{Format, Granularity};
use fp8_files::scheme::{InputScheme, Kind};

/// Advice for a layer whose features cannot be cut into groups.
pub(super) const WAY_OUT: &str = "leave it in high precision by `PrepareOptions::with_off`, or choose what becomes of it by \
     `ExportOptions::with_ragged`";

/// The scheme of a layer with this calibration; `None` if the recipe leaves its product in high precision.
pub(super) fn calibrated(calibration: &Calibration, path: &str) -> Result<Option<Kind>> {
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
        Granularity::Tensorwise => InputScheme::Static,
        Granularity::Rowwise => InputScheme::PerToken,
        Granularity::Blockwise { rows: 1, cols } => InputScheme::PerGroup(cols),
        Granularity::Mx => InputScheme::Mx,
        other => {
            let reason = format!("inputs scaled {other} have no strategy: a block holds one token");
            return Err(refused(reason).into());
        }
    };
    Ok(Some(Kind {
        weight: weight.granularity,
        input,
        power_of_two: calibration.round_scales_to_power_of_two,
        amax_bound: None,
    }))
}

/// The scheme with which an export stores a layer of these sizes; `None` if the layer stays in high precision.
pub(super) fn cut(
    scheme: Kind,
    sizes: (usize, usize),
    path: &str,
    ragged: Ragged,
) -> Result<Option<Kind>> {
    if scheme.is_ragged(sizes) {
        match ragged {
            Ragged::Refuse => {}
            Ragged::Rowwise => {
                return Ok(Some(Kind {
                    weight: Granularity::Rowwise,
                    input: InputScheme::PerToken,
                    ..scheme
                }));
            }
            Ragged::HighPrecision => return Ok(None),
        }
    }
    scheme.check(sizes, path, WAY_OUT)?;
    Ok(Some(scheme))
}
