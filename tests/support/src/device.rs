//! The device that tests run on. Shared by the tests of all packages.

use candle_core::Device;
use std::io::Write;
use std::sync::OnceLock;

/// One per process, as a program has: a stream for each of dozens of test threads would only wait for each other, and what differs
/// between streams is not what these tests are about.
static DEVICE: OnceLock<Device> = OnceLock::new();

/// `FP8_TEST_DEVICE` is `cpu` or `cuda`. Without it: CUDA if the feature is on and there is a GPU, otherwise the CPU.
///
/// # Panics
/// If CUDA is requested and not available, or the variable has another value.
pub fn device() -> Device {
    DEVICE.get_or_init(choose).clone()
}

fn choose() -> Device {
    match std::env::var("FP8_TEST_DEVICE").as_deref() {
        Ok("cpu") => Device::Cpu,
        Ok("cuda") => Device::new_cuda_with_stream(0)
            .unwrap_or_else(|error| panic!("FP8_TEST_DEVICE=cuda, but there is none: {error}")),
        Ok(other) => panic!("FP8_TEST_DEVICE={other}: expected cpu or cuda"),
        Err(_) if candle_core::utils::cuda_is_available() => Device::new_cuda_with_stream(0)
            .unwrap_or_else(|error| {
                skipped(&format!(
                    "everything on CUDA, tests run on the CPU: {error}"
                ));
                Device::Cpu
            }),
        Err(_) => Device::Cpu,
    }
}

/// Whether tests run on a GPU.
pub fn on_cuda() -> bool {
    device().is_cuda()
}

/// Says that the running test, or the rest of it, checks nothing on this machine, and why. The line is seen beside the results of
/// the tests, whose own output is captured if they pass.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // What `println!` and `eprintln!` write would be captured.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

/// Without a GPU, says that the test is skipped and returns true.
pub fn skipped_on_cpu() -> bool {
    if !on_cuda() {
        skipped("no CUDA device");
    }
    !on_cuda()
}

/// On a GPU, says why a test is skipped and returns true.
pub fn skipped_on_cuda(why: &str) -> bool {
    if on_cuda() {
        skipped(&format!("on CUDA: {why}"));
    }
    on_cuda()
}
