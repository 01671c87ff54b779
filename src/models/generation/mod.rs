//! Continues prompts with tokens or text.

mod options;
mod row;
mod sampling;
mod text;
mod tokens;
mod unused;

pub use options::GenerationOptions;
pub(crate) use row::{Ends, Row, check_prompt, checked};
pub use row::{FinishReason, Output, Token};
pub use text::{TextOutput, TextPiece, TextStream, generate_text};
pub use tokens::{Stop, generate};
