//! Writes the seeds of every target into `corpus/`.

#[path = "../bodies/mod.rs"]
#[allow(dead_code, reason = "seeds only")]
mod bodies;

fn main() -> std::io::Result<()> {
    for (target, seeds) in bodies::all_seeds() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("corpus")
            .join(target);
        std::fs::create_dir_all(&dir)?;
        for (i, seed) in seeds.iter().enumerate() {
            std::fs::write(dir.join(format!("seed-{i}")), seed)?;
        }
    }
    Ok(())
}
