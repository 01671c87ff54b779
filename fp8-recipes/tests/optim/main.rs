//! The optimizer, on the device of `FP8_TEST_DEVICE`.

mod construction;
mod devices;
mod helpers;
mod invariance;
mod master_weights;
mod state;
mod updates;
