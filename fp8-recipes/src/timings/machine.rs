//! What the times of a layer depend on besides the layer.

use crate::error::Result;
use candle_core::Device;
use fp8_core::Isa;

/// The processor or accelerator with everything else that decides how fast a layer is: instruction set, threads, this crate's version.
pub(super) fn machine(device: &Device) -> Result<String> {
    let version = env!("CARGO_PKG_VERSION");
    // Debug and release builds differ by far more than FP8 and high precision.
    let build = match cfg!(debug_assertions) {
        true => ", debug build",
        false => "",
    };
    let place = match device {
        Device::Cpu => {
            let isa = Isa::from_env().map_err(candle_core::Error::wrap)?;
            let threads = rayon::current_num_threads();
            // candle has a pool of its own, whose default is far slower for small layers than a number that is set.
            let candle = std::env::var("CANDLE_NUM_THREADS");
            let candle = candle.map_or(String::new(), |number| format!(" (candle {number})"));
            let (processor, isa) = (processor(), isa.level().name());
            format!("{processor}, {isa}, {threads} threads{candle}")
        }
        device => accelerator(device)?,
    };
    Ok(format!("{place}, fp8 {version}{build}"))
}

/// The name that the processor gives itself, and the numbers of its design: virtual machines shorten the name.
#[cfg(target_arch = "x86_64")]
fn processor() -> String {
    let cpu = raw_cpuid::CpuId::new();
    let brand = cpu.get_processor_brand_string();
    let name = brand
        .as_ref()
        .map_or("x86_64", |brand| brand.as_str().trim());
    match cpu.get_feature_info() {
        Some(info) => format!("{name} ({}-{})", info.family_id(), info.model_id()),
        None => name.to_string(),
    }
}

/// Other processors have no instruction that names them.
#[cfg(not(target_arch = "x86_64"))]
fn processor() -> String {
    std::env::consts::ARCH.to_string()
}

#[cfg(feature = "cuda")]
fn accelerator(device: &Device) -> Result<String> {
    Ok(fp8_candle::device::cuda_info(device)?.chip)
}

#[cfg(not(feature = "cuda"))]
fn accelerator(device: &Device) -> Result<String> {
    Ok(format!("{:?}", device.location()))
}
