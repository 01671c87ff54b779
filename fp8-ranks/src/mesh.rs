//! Ranks in a grid with named axes.

use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use std::sync::Arc;

/// A group whose ranks are the places of a grid, row by row: with axes `data` of 2 and `model` of 3, rank 4 is at 1 of `data` and
/// 1 of `model`. Each axis is a group of the ranks that differ in that coordinate alone.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_ranks::{DeviceMesh, ReduceOp, threads};
///
/// threads::run(4, |group| -> candle_core::Result<()> {
///     let mesh = DeviceMesh::new(&group, &[("data", 2), ("model", 2)])?;
///     assert_eq!(mesh.coordinate(), [group.rank() / 2, group.rank() % 2]);
///     let rank = Tensor::new(group.rank() as f32, &Device::Cpu)?;
///     let model = mesh.axis("model").expect("an axis of this name");
///     let sum = model.all_reduce(&rank, ReduceOp::Sum)?.to_scalar::<f32>()?;
///     assert_eq!(sum, if group.rank() < 2 { 0. + 1. } else { 2. + 3. });
///     Ok(())
/// })
/// .into_iter()
/// .collect::<Result<(), _>>()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DeviceMesh {
    whole: ProcessGroup,
    names: Vec<Arc<str>>,
    sizes: Vec<usize>,
    coordinate: Vec<usize>,
    axes: Vec<ProcessGroup>,
}

impl DeviceMesh {
    /// All ranks of `group` call it, with the same axes: names and sizes, the slowest first.
    ///
    /// # Errors
    /// No axes, an empty name, one that was given twice; sizes that do not multiply to the group's size; a failed split.
    pub fn new(group: &ProcessGroup, axes: &[(&str, usize)]) -> Result<Self> {
        let names: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
        let again = |(i, name): (usize, &&str)| names[..i].contains(name);
        let problem = if names.is_empty() {
            Some("give one at least")
        } else if names.contains(&"") {
            Some("give each a name")
        } else if names.iter().enumerate().any(again) {
            Some("give each a name of its own")
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(Error::MeshNames {
                axes: names.into_iter().map(str::to_owned).collect(),
                problem,
            });
        }
        let sizes: Vec<_> = axes.iter().map(|(_, size)| *size).collect();
        let product = sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size));
        if product != Some(group.size()) {
            let named = axes.iter().map(|(name, size)| ((*name).to_owned(), *size));
            return Err(Error::MeshSize {
                group: group.name().into(),
                axes: named.collect(),
                product: product.unwrap_or(usize::MAX),
                size: group.size(),
            });
        }
        let mut coordinate = vec![0; sizes.len()];
        let mut rest = group.rank();
        for (axis, size) in sizes.iter().enumerate().rev() {
            coordinate[axis] = rest % size;
            rest /= size;
        }
        let mut mesh = Self {
            whole: group.clone(),
            names: names.into_iter().map(Arc::from).collect(),
            sizes,
            coordinate,
            axes: vec![],
        };
        for axis in 0..mesh.names.len() {
            let group = mesh.split(&[axis])?;
            mesh.axes.push(group);
        }
        Ok(mesh)
    }

    /// The group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.whole
    }

    /// Names of the axes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// Sizes of the axes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Where this rank is on each axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.coordinate
    }

    /// The ranks that differ from this one on this axis alone, in its order; `None` if no axis has this name.
    pub fn axis(&self, name: &str) -> Option<&ProcessGroup> {
        let axis = self.names.iter().position(|one| **one == *name)?;
        Some(&self.axes[axis])
    }

    /// The ranks that differ from this one on these axes alone, in row-major order of the axes as they are named here. A new
    /// group: all ranks of the mesh call it with the same names. Without names, this rank alone.
    ///
    /// # Errors
    /// A name that no axis has, or that was given twice; a failed split.
    pub fn axes(&self, names: &[&str]) -> Result<ProcessGroup> {
        let position = |name: &&str| self.names.iter().position(|one| **one == **name);
        let found: Option<Vec<_>> = names.iter().map(position).collect();
        let twice = |found: &Vec<usize>| (1..found.len()).any(|i| found[..i].contains(&found[i]));
        match found.filter(|found| !twice(found)) {
            Some(found) => self.split(&found),
            None => Err(Error::MeshAxis {
                asked: names.iter().map(|name| (*name).to_owned()).collect(),
                axes: self.names().map(str::to_owned).collect(),
            }),
        }
    }

    fn split(&self, axes: &[usize]) -> Result<ProcessGroup> {
        let place = |place: usize, axis: usize| place * self.sizes[axis] + self.coordinate[axis];
        let key = axes.iter().fold(0, |key, axis| place(key, *axis));
        let others = (0..self.sizes.len()).filter(|axis| !axes.contains(axis));
        let color = others.fold(0, place);
        let names: Vec<_> = axes.iter().map(|axis| &*self.names[*axis]).collect();
        let group = self.whole.split(Some(color), key, &names.join("+"))?;
        Ok(group.unwrap_or_else(|| unreachable!("a rank with a color has a group")))
    }
}
