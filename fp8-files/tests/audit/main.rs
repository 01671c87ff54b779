//! The check of model files: seeded faults are named, sound folders are not blamed.

mod hostile;
mod seeded;
mod sound;
mod support;
