//! Calibration, the FP8 inference file, and loading it again.

mod bad_files;
mod calibration;
mod failing_writes;
mod files;
mod language_model;
mod net;
mod schemes;
mod served;
mod spellings;
mod tied;
mod written;
