//! Tests on several processes, which a launcher of MPI starts.

use crate::child::{child, from_parent};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The folder in which every rank that has passed leaves a file. Output does not tell them: `mpirun` mixes that of several ranks, also
/// within lines.
const PASSED: &str = "FP8_RANKS_PASSED";

/// The line after which a rank comes to nothing more.
pub const LAST_WORDS: &str = "the rank leaves";

/// What a job has said and how it ended.
pub struct Ended {
    /// How `mpirun` ended.
    pub status: ExitStatus,
    /// Both streams of all ranks.
    pub said: String,
    /// From [`LAST_WORDS`] to the end.
    pub took: Duration,
    /// How many ranks have called [`rank_passed`]; 0 without [`mpirun`].
    pub passed: usize,
}

/// This test program on so many ranks, to run one ignored test; see [`child`].
///
/// # Panics
/// If the path of this program is not known, or if no temporary folder can be made.
pub fn mpirun(ranks: usize, test: &str) -> Command {
    let child = child(test);
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    let job = JOBS.fetch_add(1, Ordering::Relaxed);
    let passed = std::env::temp_dir().join(format!("fp8-ranks-{}-{job}", std::process::id()));
    std::fs::create_dir(&passed).expect("a temporary folder");
    let mut command = Command::new("mpirun");
    command.env(PASSED, passed);
    command.args(["-n", &ranks.to_string()]);
    command.arg(child.get_program()).args(child.get_args());
    // As root, with more ranks than cores, and with threads beside each rank.
    for (name, value) in [
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("RUST_BACKTRACE", "0"),
    ] {
        command.env(name, value);
    }
    command
}

/// What a rank calls at the end of its test; see [`Ended::passed`].
///
/// # Panics
/// If [`mpirun`] has not started this process, or if the file cannot be written.
pub fn rank_passed(rank: usize) {
    let file = Path::new(&from_parent(PASSED)).join(rank.to_string());
    std::fs::write(file, []).expect("a file in the folder of ranks that passed");
}

/// Runs a command, of [`mpirun`] or another, to its end.
///
/// # Panics
/// If it cannot be started, or if it has not ended after `limit`; it is killed then.
pub fn run(command: &mut Command, limit: Duration) -> Ended {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = command.spawn().expect("mpirun; is Open MPI installed?");
    let mut stderr = started.stderr.take().expect("a pipe");
    let errors = std::thread::spawn(move || {
        let mut text = vec![];
        stderr
            .read_to_end(&mut text)
            .map(|_| String::from_utf8_lossy(&text).into_owned())
    });
    let stdout = BufReader::new(started.stdout.take().expect("a pipe"));
    let lines = std::thread::spawn(move || {
        let (mut text, mut left) = (String::new(), None);
        for line in stdout.lines().map_while(std::io::Result::ok) {
            if line.contains(LAST_WORDS) {
                left = Some(Instant::now());
            }
            text += &line;
            text += "\n";
        }
        (text, left)
    });
    let begin = Instant::now();
    let status = loop {
        match started.try_wait().expect("a status") {
            Some(status) => break status,
            None if begin.elapsed() > limit => {
                let _ = started.kill();
                break started.wait().expect("a status");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let (end, hung) = (Instant::now(), begin.elapsed() > limit);
    let (mut said, left) = lines.join().expect("the lines");
    said += &errors.join().expect("the errors").expect("text");
    let job = command.get_envs().find(|(name, _)| *name == PASSED);
    let passed = job.and_then(|(_, folder)| folder).map_or(0, |folder| {
        let ranks = std::fs::read_dir(folder)
            .expect("the folder of the job")
            .count();
        std::fs::remove_dir_all(folder).expect("the folder of the job");
        ranks
    });
    assert!(!hung, "it did not end: {said}");
    Ended {
        status,
        said,
        took: end - left.unwrap_or(begin),
        passed,
    }
}

/// Not a measure of speed: the end of a job that would hang.
pub const HANGS: Duration = Duration::from_secs(300);

/// Whether `mpirun` is Open MPI's.
///
/// # Panics
/// If it cannot be started.
pub fn launcher_is_open_mpi() -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    let version = version.expect("mpirun").stdout;
    String::from_utf8_lossy(&version).contains("Open MPI")
}
