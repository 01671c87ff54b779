//! Memory of tensors.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};

/// The address of a tensor's storage: equal for tensors that share memory.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize
}

/// The elements of a tensor, to be changed in place.
pub(super) struct Memory<'a> {
    pub(super) storage: &'a mut CpuStorage,
    pub(super) range: Range<usize>,
}

type Change<'f> = dyn FnMut(Vec<Memory<'_>>) -> Result<()> + 'f;

/// Calls `change` once with the memory of all `tensors`, which must be contiguous, on the CPU, and share no memory.
pub(super) fn change_in_place(tensors: &[&Tensor], change: &mut Change<'_>) -> Result<()> {
    open(tensors, vec![], change)
}

/// candle opens one tensor at a time: each opens the next one.
fn open(closed: &[&Tensor], opened: Vec<Memory<'_>>, change: &mut Change<'_>) -> Result<()> {
    match closed.split_first() {
        None => change(opened),
        Some((tensor, closed)) => tensor.inplace_op1(&Open {
            closed,
            opened: RefCell::new(opened),
            change: RefCell::new(change),
        }),
    }
}

struct Open<'a, 'm> {
    closed: &'a [&'a Tensor],
    opened: RefCell<Vec<Memory<'m>>>,
    change: RefCell<&'a mut Change<'a>>,
}

impl InplaceOp1 for Open<'_, '_> {
    fn name(&self) -> &'static str {
        "optimizer"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!(
                "{}: a tensor that is updated must be contiguous",
                self.name()
            )
        };
        let mut opened = self.opened.take();
        let range = start..end;
        opened.push(Memory { storage, range });
        open(self.closed, opened, *self.change.borrow_mut())
    }
}
