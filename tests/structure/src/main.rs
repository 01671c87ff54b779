//! tmp
use fp8_structure::{Crate, circles};
use std::path::Path;
fn main() {
    let root = std::env::args().nth(1).unwrap();
    let root = Path::new(&root);
    let mut crates = vec![];
    for (name, file) in [
        ("fp8_core", "fp8-core/src/lib.rs"),
        ("fp8_candle", "fp8-candle/src/lib.rs"),
        ("fp8_recipes", "fp8-recipes/src/lib.rs"),
        ("fp8", "src/lib.rs"),
    ] {
        crates.push(Crate::read(name, &root.join(file)).unwrap());
    }
    let arrows = Crate::arrows(&crates);
    println!("{} arrows", arrows.len());
    for c in circles(&arrows) {
        println!("circle of {}:", c.len());
        for a in &arrows {
            if c.contains(a.from.as_path()) && c.contains(a.to.as_path()) {
                println!(
                    "   {} -> {}: {:?}",
                    a.from.strip_prefix(root).unwrap().display(),
                    a.to.strip_prefix(root).unwrap().display(),
                    a.names
                );
            }
        }
    }
    if std::env::args().nth(2).is_some() {
        for a in &arrows {
            println!(
                "A {} {} {:?}",
                a.from.strip_prefix(root).unwrap().display(),
                a.to.strip_prefix(root).unwrap().display(),
                a.names
            );
        }
    }
}
