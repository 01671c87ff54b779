//! Updates in place over the memory of the CPU.

mod pass;
mod slice;
mod stored;
mod value;

pub(super) use pass::{Keys, Pass, run};
pub(super) use slice::{PIECE, Slice};
pub(super) use stored::Operand;
pub(super) use value::Value;
