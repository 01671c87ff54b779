//! Model files of candle-transformers, ported to fp8 by replacing `use` lines and adding one derive line above each type that
//! holds layers. The files are read from cargo's registry when this package is built.

#[allow(dead_code, unexpected_cfgs, clippy::all)]
mod models {
    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}
pub use models::*;

/// The files' `crate::utils`.
pub mod utils {
    pub use candle_transformers::utils::*;
}

/// A ported file.
pub struct Carried {
    /// Name of the model.
    pub name: &'static str,
    /// The file in the registry.
    pub stock: &'static str,
    /// The text that is compiled here.
    pub ours: &'static str,
}

/// All ported files.
pub const CARRIED: [Carried; 4] = include!(concat!(env!("OUT_DIR"), "/list.rs"));

/// A change of one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A replaced `use` line: the stock one and ours.
    ReplacedUse(&'static str, &'static str),
    /// An added `use` line.
    AddedUse(&'static str),
    /// A derive line, and the line below it.
    Derive(&'static str, &'static str),
    /// Anything else.
    Other(Option<&'static str>, Option<&'static str>),
}

impl Carried {
    /// Every difference between the two texts.
    pub fn changes(&self) -> Vec<Change> {
        let mut changes = vec![];
        let mut stock = self.stock.lines().peekable();
        let mut ours = self.ours.lines().peekable();
        loop {
            let (there, here) = (stock.peek().copied(), ours.next());
            let change = match (there, here) {
                (None, None) => return changes,
                (Some(there), Some(here)) if there == here => {
                    stock.next();
                    continue;
                }
                (Some(_), Some(here)) if here.starts_with("#[derive(") => {
                    Change::Derive(here, ours.peek().copied().unwrap_or_default())
                }
                (Some(there), Some(here)) if here.starts_with("use ") => {
                    // Added, if the stock line comes next.
                    if ours.peek() == Some(&there) {
                        Change::AddedUse(here)
                    } else if there.starts_with("use ") {
                        stock.next();
                        Change::ReplacedUse(there, here)
                    } else {
                        Change::Other(None, Some(here))
                    }
                }
                (there, here) => {
                    stock.next();
                    Change::Other(there, here)
                }
            };
            changes.push(change);
        }
    }
}
