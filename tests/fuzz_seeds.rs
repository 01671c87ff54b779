//! Runs the fuzz targets on their seeds, and on seeds with one byte changed or the end cut off.

#[path = "../fuzz/bodies/mod.rs"]
mod bodies;

/// Runs `body` on seeds and mutations of them. Only some bytes of a long seed are changed, so that a test takes a
/// second or two.
fn check(seeds: Vec<Vec<u8>>, body: fn(&[u8])) {
    for seed in seeds {
        body(&seed);
        let stride = seed.len().div_ceil(700).max(1);
        for at in (0..seed.len()).step_by(stride) {
            for change in [
                |_| 0xFF,
                |_| b'0',
                |byte: u8| byte ^ 0x80,
                |byte: u8| byte.wrapping_add(1),
            ] {
                let mut changed = seed.clone();
                changed[at] = change(seed[at]);
                body(&changed);
            }
            if at.is_multiple_of(4) {
                body(&seed[..at]);
            }
        }
    }
}

#[test]
fn loading_gives_values_or_errors() {
    check(bodies::load::seeds(), bodies::load::run);
}

#[test]
fn every_family_gives_values_or_errors() {
    for (at, seed) in bodies::families::seeds().iter().enumerate() {
        let opened = bodies::families::open(seed);
        assert!(
            opened.is_some_and(|c| !c.layer_paths().is_empty()),
            "seed {at}"
        );
    }
    check(bodies::families::seeds(), bodies::families::run);
}

#[test]
fn resuming_succeeds_or_changes_nothing() {
    check(bodies::resume::seeds(), bodies::resume::run);
}

#[test]
fn recipes_come_back_the_same() {
    check(bodies::recipe::seeds(), bodies::recipe::run);
}

#[test]
fn every_target_has_seeds() {
    for (target, seeds) in bodies::all_seeds() {
        assert!(seeds.len() >= 3, "{target}");
    }
}
