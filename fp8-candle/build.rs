//! With the CUDA feature, compiles `kernels/*.cu` to PTX and that to machine code; does nothing without it.

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
    use std::process::Command;

    /// The machine code that can be made, and the architecture of the PTX it is made from. 80: casts and emulation on chips without
    /// FP8 units; 89: Ada and newer chips; 90a: Hopper. Chips of the last two do what this library asks of them by the code of
    /// 89. The driver would make machine code when a kernel is first used, which takes half a minute for all of them, and it
    /// refuses PTX of a toolkit that is newer than itself.
    const ARCHITECTURES: [(&str, &str); 5] = [
        ("80", "80"),
        ("89", "89"),
        ("90a", "90a"),
        ("100", "89"),
        ("120", "89"),
    ];

    /// Which of them are built, separated by commas; all if it is not set. A program for one chip is a third as large.
    const VARIABLE: &str = "FP8_CUDA_ARCHITECTURES";

    /// What to build: those that [`VARIABLE`] lists. The PTX of the last goes into the program too, for chips that are newer.
    fn architectures() -> Vec<(&'static str, &'static str)> {
        println!("cargo::rerun-if-env-changed={VARIABLE}");
        let Ok(list) = std::env::var(VARIABLE) else {
            return ARCHITECTURES.to_vec();
        };
        let wanted: Vec<&str> = list.split(',').map(str::trim).collect();
        for name in &wanted {
            assert!(
                ARCHITECTURES.iter().any(|(arch, _)| arch == name),
                "{VARIABLE}={list}: {name:?} is none of 80, 89, 90a, 100, 120"
            );
        }
        let known = ARCHITECTURES.into_iter();
        known.filter(|(arch, _)| wanted.contains(arch)).collect()
    }

    pub fn compile() {
        let ptxas = ptxas();
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let (sources, architectures) = (sources(), architectures());
        let mut compiled: Vec<&str> = architectures.iter().map(|&(_, ptx)| ptx).collect();
        compiled.sort_unstable();
        compiled.dedup();
        for arch in compiled {
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
        let mut missing = None;
        for &(arch, ptx) in &architectures {
            let (from, to) = (
                out.join(format!("sm_{ptx}")),
                out.join(format!("cubin_{arch}")),
            );
            std::fs::create_dir_all(&to).expect("the build folder can be written");
            for source in &sources {
                let stem = stem(source);
                let ptx = from.join(format!("{stem}.ptx"));
                missing = missing.or(assemble(&ptxas, arch, &ptx, &to.join(stem)));
            }
        }
        if let Some(error) = missing {
            println!("cargo::warning=no ptxas, so kernels are compiled when first used: {error}");
        }
        std::fs::write(out.join("modules.rs"), modules(&sources, &architectures))
            .expect("the build folder can be written");
    }

    /// `to.cubin` by NVIDIA's assembler, and `to.resources`, what it says of registers and memory. Both are empty where it is
    /// missing or does not know the architecture: the PTX remains. The error of starting it, if it is missing.
    fn assemble(ptxas: &Path, arch: &str, ptx: &Path, to: &Path) -> Option<std::io::Error> {
        let (cubin, resources) = (to.with_extension("cubin"), to.with_extension("resources"));
        let stand_in = std::fs::read(ptx).is_ok_and(|text| text.starts_with(b"// stand-in"));
        let done = (!stand_in).then(|| {
            Command::new(ptxas)
                .args(["-v", "-O3", &format!("-arch=sm_{arch}"), "-o"])
                .args([&cubin, ptx])
                .output()
        });
        let (made, missing) = match done {
            Some(Ok(output)) => (output.status.success().then_some(output.stderr), None),
            Some(Err(error)) => (None, Some(error)),
            None => (None, None),
        };
        let said = made.unwrap_or_else(|| {
            std::fs::write(&cubin, []).expect("the build folder can be written");
            vec![]
        });
        std::fs::write(resources, said).expect("the build folder can be written");
        missing
    }

    /// The assembler of the toolkit whose compiler is used; the first on PATH if the compiler is a script elsewhere.
    fn ptxas() -> PathBuf {
        let toolkit = cudaforge::CudaToolkit::detect();
        let beside = toolkit.map(|toolkit| toolkit.nvcc_path.with_file_name("ptxas"));
        beside
            .ok()
            .filter(|ptxas| ptxas.exists())
            .unwrap_or_else(|| "ptxas".into())
    }

    fn stem(source: &Path) -> &str {
        let stem = source.file_stem().and_then(|stem| stem.to_str());
        stem.expect("kernel files have plain names")
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

    /// A constant per file: its machine code for each architecture, and the PTX of the last.
    fn modules(sources: &[PathBuf], architectures: &[(&str, &str)]) -> String {
        let (last, ptx) = architectures
            .last()
            .expect("at least one architecture is built");
        let mut code = String::new();
        for source in sources {
            let stem = stem(source);
            let name = stem.to_uppercase();
            let _ = writeln!(code, "pub(crate) static {name}: Module = Module {{");
            let _ = writeln!(code, "    name: \"fp8_{stem}\",");
            let text = built(ptx, "sm", stem, "ptx");
            let _ = writeln!(code, "    ptx: (\"{ptx}\", include_str!({text})),");
            code.push_str("    cubins: &[\n");
            for (arch, _) in architectures {
                let file = built(arch, "cubin", stem, "cubin");
                let _ = writeln!(code, "        (\"{arch}\", include_bytes!({file})),");
            }
            // Checks read that of Hopper, if it is built.
            let hopper = architectures.iter().find(|(arch, _)| *arch == "90a");
            let arch = hopper.unwrap_or(&(last, ptx)).0;
            let resources = built(arch, "cubin", stem, "resources");
            let _ = writeln!(
                code,
                "    ],\n    #[cfg(test)]\n    resources: include_str!({resources}),\n}};"
            );
        }
        code
    }

    /// The path of a built file, as code.
    fn built(arch: &str, folder: &str, stem: &str, extension: &str) -> String {
        format!("concat!(env!(\"OUT_DIR\"), \"/{folder}_{arch}/{stem}.{extension}\")")
    }
}
