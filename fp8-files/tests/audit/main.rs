//! The check of model files: seeded faults are named, sound folders are not blamed.

mod families;
mod hostile;
mod seeded;
mod sound;
mod support;
