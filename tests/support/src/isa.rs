//! Runs tests on every instruction set of the machine.

use fp8_core::Isa;
use std::process::Command;

/// Runs this test program again for each instruction set below the best one, chosen with `FP8_ISA`: the tests whose names
/// contain one of `tests`, or all of them if it is empty.
///
/// A new process is needed because the choice holds for a whole process. If `FP8_ISA` is already set, nothing is run again.
///
/// # Panics
/// If a test fails on one of them.
pub fn run_again_on_each(tests: &[&str]) {
    const VARIABLE: &str = "FP8_ISA";
    if std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let program = std::env::current_exe().expect("the path of this program");
    let best = Isa::best();
    for isa in Isa::available().filter(|&isa| isa != best) {
        let name = isa.level().name();
        let output = Command::new(&program)
            .env(VARIABLE, name)
            .arg("--quiet")
            .args(tests)
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        assert!(
            output.status.success(),
            "{VARIABLE}={name}:\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
