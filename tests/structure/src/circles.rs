//! Files that import each other, straight or through others.

use crate::arrows::Arrow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The sets of files each of which reaches all others of its set.
pub fn circles(arrows: &[Arrow]) -> Vec<BTreeSet<&Path>> {
    let mut next: BTreeMap<&Path, Vec<&Path>> = BTreeMap::new();
    for arrow in arrows {
        next.entry(&arrow.from).or_default().push(&arrow.to);
    }
    let reach: BTreeMap<&Path, BTreeSet<&Path>> = next
        .keys()
        .map(|&file| (file, reached(file, &next)))
        .collect();
    let mut found = BTreeSet::new();
    for (&file, to) in &reach {
        let circle: BTreeSet<&Path> = to
            .iter()
            .filter(|other| reach.get(*other).is_some_and(|back| back.contains(file)))
            .copied()
            .collect();
        if !circle.is_empty() {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

/// All files that can be reached from one: itself only by a circle.
fn reached<'a>(file: &'a Path, next: &BTreeMap<&'a Path, Vec<&'a Path>>) -> BTreeSet<&'a Path> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![file]);
    while let Some(file) = open.pop() {
        for &to in next.get(file).into_iter().flatten() {
            if seen.insert(to) {
                open.push(to);
            }
        }
    }
    seen
}
