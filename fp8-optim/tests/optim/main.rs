//! The optimizer, on the device of `FP8_TEST_DEVICE`.

mod construction;
mod devices;
mod fp8_moments;
mod groups;
mod helpers;
mod invariance;
mod loss_scaler;
mod master_weights;
mod overflow;
mod sgd;
mod sides;
mod sixteen_bit_masters;
mod state;
mod unfinished;
mod updates;
