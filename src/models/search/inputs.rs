//! The inputs of a block's linear layers, seen by taps.

use crate::models::error::Result;
use crate::models::families::Blocks;
use crate::models::layers::Tap;
use candle_core::Tensor;
use std::collections::BTreeSet;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Layers that read the same input, and that input.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) paths: Vec<String>,
    pub(super) input: Tensor,
}

/// A block with taps that see the inputs of some of its layers.
pub(super) struct Viewer<B: Blocks> {
    block: B::Block,
    shown: Arc<Mutex<Vec<Group>>>,
    stops: bool,
}

impl<B: Blocks> Viewer<B> {
    /// Shows the layers with these paths.
    pub(super) fn new(block: &B::Block, paths: &BTreeSet<&str>) -> Self {
        Self::of(block, paths, false)
    }

    /// Shows one layer, and computes nothing after it.
    pub(super) fn up_to(block: &B::Block, path: &str) -> Self {
        Self::of(block, &BTreeSet::from([path]), true)
    }

    fn of(block: &B::Block, paths: &BTreeSet<&str>, stops: bool) -> Self {
        let mut block = block.clone();
        let shown = Arc::<Mutex<Vec<Group>>>::default();
        for layer in B::projections(&mut block) {
            if !paths.contains(layer.path()) {
                continue;
            }
            let shown = shown.clone();
            layer.set_tap(Some(Tap::new(move |path, x| {
                let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
                match shown.last_mut() {
                    Some(group) if group.input.id() == x.id() => group.paths.push(path.into()),
                    _ => shown.push(Group {
                        paths: vec![path.into()],
                        input: x.clone(),
                    }),
                }
                match stops {
                    true => Err(candle_core::Error::msg("the block stops here")),
                    false => Ok(()),
                }
            })));
        }
        Self {
            block,
            shown,
            stops,
        }
    }

    /// The block's output for `x`, if it was computed, and the inputs of its layers in the order of their use.
    pub(super) fn run(&self, model: &B, x: &Tensor) -> Result<(Option<Tensor>, Vec<Group>)> {
        let y = model.pass(&self.block, x);
        let groups = take(&mut *self.lock());
        match y {
            Ok(y) => Ok((Some(y.detach()), groups)),
            // The block has stopped where it was asked to.
            Err(_) if !groups.is_empty() && self.stops => Ok((None, groups)),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Group>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
