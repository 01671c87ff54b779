//! The bodies of the fuzz targets and their seeds. An ordinary test runs the targets on the seeds.

pub mod families;
pub mod load;
pub mod recipe;
pub mod resume;

use std::path::PathBuf;

/// The seeds of each target.
pub fn all_seeds() -> [(&'static str, Vec<Vec<u8>>); 4] {
    [
        ("families", families::seeds()),
        ("load", load::seeds()),
        ("resume", resume::seeds()),
        ("recipe", recipe::seeds()),
    ]
}

/// A directory for this thread, in memory if the system has a place for that.
fn scratch() -> PathBuf {
    thread_local! {
        static DIR: tempfile::TempDir = {
            let memory = std::path::Path::new("/dev/shm");
            match memory.is_dir() {
                true => tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()),
                false => tempfile::tempdir(),
            }
            .unwrap()
        };
    }
    DIR.with(|dir| dir.path().to_path_buf())
}
