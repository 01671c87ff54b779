//! Groups of ranks and their operations.

mod amax;
mod exchange;
mod member;
mod options;
mod process_group;
mod reduce;
mod rows;
mod started;

pub use options::GroupOptions;
pub use process_group::ProcessGroup;
pub use started::Started;
