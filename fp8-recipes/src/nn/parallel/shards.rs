//! The parts of a matrix that the axes of a mesh divide.

use crate::error::Result;
use fp8_candle::Shards;
use fp8_candle::state::ReductionGroup;
use fp8_ranks::{DeviceMesh, ProcessGroup};
use std::sync::Arc;

/// The ranks along these axes; None without axes. All ranks of the mesh call it.
pub(super) fn group(mesh: &DeviceMesh, axes: &[&str]) -> Result<Option<ProcessGroup>> {
    match axes {
        [] => Ok(None),
        [axis] => match mesh.axis(axis) {
            Some(group) => Ok(Some(group.clone())),
            // Its error names the axes of the mesh.
            None => Ok(Some(mesh.axes(axes)?)),
        },
        axes => Ok(Some(mesh.axes(axes)?)),
    }
}

/// The parts of a matrix whose rows and columns these axes divide. All ranks of the mesh call it.
pub(super) fn shards(mesh: &DeviceMesh, rows: &[&str], cols: &[&str]) -> Result<Shards> {
    let one = |axes: &[&str]| -> Result<_> {
        let group = group(mesh, axes)?;
        Ok(group.map(|group| Arc::new(group) as Arc<dyn ReductionGroup>))
    };
    let (own_rows, own_cols) = (one(rows)?, one(cols)?);
    let all = match (rows, cols) {
        ([], _) => own_cols.clone(),
        (_, []) => own_rows.clone(),
        _ => one(&[rows, cols].concat())?,
    };
    Ok(Shards::new(own_rows, own_cols, all))
}
