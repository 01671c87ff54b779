//! Compiles `kernels/*.cu` to PTX with the CUDA feature; does nothing without it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    #[cfg(feature = "cuda")]
    cuda::compile();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    /// 80: casts and emulation on chips without FP8 units; 89: Ada, and newer chips through the driver's compiler; 90a:
    /// Hopper.
    const ARCHITECTURES: [&str; 3] = ["80", "89", "90a"];

    pub fn compile() {
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let sources = sources();
        for arch in ARCHITECTURES {
            let dir = out.join(format!("sm_{arch}"));
            std::fs::create_dir_all(&dir).expect("the build folder can be written");
            cudaforge::KernelBuilder::new()
                .compute_cap_arch(arch)
                .source_files(&sources)
                .watch(["kernels"])
                .out_dir(&dir)
                .arg("-std=c++17")
                .arg("-O3")
                .build_ptx()
                .unwrap_or_else(|error| panic!("nvcc for compute capability {arch}: {error}"));
        }
        std::fs::write(out.join("modules.rs"), modules(&sources))
            .expect("the build folder can be written");
    }

    fn sources() -> Vec<PathBuf> {
        let folder = std::fs::read_dir("kernels").expect("kernels/ lies beside this script");
        let mut sources: Vec<_> = folder
            .map(|entry| entry.expect("kernels/ can be read").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
            .collect();
        sources.sort();
        sources
    }

    /// A constant per file: its PTX for each architecture.
    fn modules(sources: &[PathBuf]) -> String {
        let mut code = String::new();
        for source in sources {
            let stem = source.file_stem().and_then(|stem| stem.to_str());
            let stem = stem.expect("kernel files have plain names");
            let name = stem.to_uppercase();
            let _ = writeln!(code, "pub(crate) static {name}: Module = Module {{");
            let _ = writeln!(code, "    name: \"fp8_{stem}\",\n    ptx: [");
            for arch in ARCHITECTURES {
                let path = Path::new(&format!("sm_{arch}")).join(format!("{stem}.ptx"));
                let _ = writeln!(
                    code,
                    "        include_str!(concat!(env!(\"OUT_DIR\"), \"/{}\")),",
                    path.display()
                );
            }
            code.push_str("    ],\n};\n");
        }
        code
    }
}
