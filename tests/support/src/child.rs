//! Tests that run in a process of their own, which another test starts.

use std::process::Command;

/// This test program again, to run the ignored test of this path only. Its output is not captured.
///
/// Such a test is marked `#[ignore = "run by <parent> in a child process"]`, and gets its arguments through environment variables.
///
/// # Panics
/// If the path of this program is not known.
pub fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["--ignored", "--exact", test, "--nocapture"]);
    command
}

/// [`child`] started by a shell that limits files to 64 blocks of 512 or 1024 bytes. A write beyond that is an error, not a signal.
pub fn child_under_a_file_size_limit(test: &str) -> Command {
    let child = child(test);
    let mut shell = Command::new("sh");
    // Without the trap the system would kill the process.
    shell
        .args(["-c", "trap '' XFSZ; ulimit -f 64 && exec \"$0\" \"$@\""])
        .arg(child.get_program())
        .args(child.get_args());
    shell
}

/// A variable of the environment that the parent of this test has set.
///
/// # Panics
/// If it is not set: the test was not started by its parent.
pub fn from_parent(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is set by the test that starts this one"))
}
