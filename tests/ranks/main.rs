//! Several ranks: threads of one process stand for the processes of a job.

mod accumulated;
mod data_parallel;
mod data_parallel_files;
mod early_errors;
#[path = "../../examples/gpt/mod.rs"]
#[allow(dead_code, reason = "the examples generate as well")]
mod gpt;
mod parallel_dense;
#[path = "../../examples/shared/parameters.rs"]
#[allow(dead_code, reason = "scaled parameters are not trained here")]
mod parameters;
mod scales;
mod sharded;
mod sharded_codes;
mod sharded_files;
mod sharding;
mod tensor_parallel;
mod tensor_parallel_training;
mod training;
mod two_models;
