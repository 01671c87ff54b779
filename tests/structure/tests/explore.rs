//! Throw-away.
use fp8_structure::{Crate, circles};
use std::path::Path;
#[test]
fn explore() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates: Vec<Crate> = [
        ("fp8_core", "fp8-core/src/lib.rs"),
        ("fp8_candle", "fp8-candle/src/lib.rs"),
        ("fp8_recipes", "fp8-recipes/src/lib.rs"),
    ]
    .iter()
    .map(|(n, f)| Crate::read(n, &root.join(f)).unwrap())
    .collect();
    let arrows = Crate::arrows(&crates);
    let short = |p: &Path| {
        p.strip_prefix(root.join("fp8-recipes/src"))
            .unwrap_or(p)
            .display()
            .to_string()
    };
    for circle in circles(&arrows) {
        println!("CIRCLE {}", circle.len());
        for a in &arrows {
            if circle.contains(a.from.as_path()) && circle.contains(a.to.as_path()) {
                println!("  {} -> {} {:?}", short(&a.from), short(&a.to), a.names);
            }
        }
    }
    println!("ALL");
    for a in &arrows {
        let (f, t) = (short(&a.from), short(&a.to));
        if !f.starts_with('/') && !t.starts_with('/') {
            println!("A {f} -> {t} {:?}", a.names);
        }
    }
}
