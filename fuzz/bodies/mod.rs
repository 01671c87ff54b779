//! What the fuzz targets do with their input, and the inputs that they start from. An ordinary test runs the targets on these inputs.

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

/// A directory of this thread, in memory where the system has such a place.
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
