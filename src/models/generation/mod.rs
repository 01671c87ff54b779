//! Continues prompts with tokens or text.

mod options;
mod sampling;
mod text;
mod tokens;

pub use options::GenerationOptions;
pub use text::{TextOutput, TextPiece, TextStream, generate_text};
pub use tokens::{FinishReason, Output, Stop, Token, generate};
