//! The rules of ARCHITECTURE.md: no circle of files, no arrow upward between rooms.

use fp8_structure::{Arrow, Crate, circles};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Crates and their root files; a later one may name an earlier one.
const CRATES: &[(&str, &str)] = &[
    ("fp8_derive", "fp8-derive/src/lib.rs"),
    ("fp8_core", "fp8-core/src/lib.rs"),
    ("fp8_candle", "fp8-candle/src/lib.rs"),
    ("fp8_ranks", "fp8-ranks/src/lib.rs"),
    ("fp8_files", "fp8-files/src/lib.rs"),
    ("fp8_scaled", "fp8-scaled/src/lib.rs"),
    ("fp8_optim", "fp8-optim/src/lib.rs"),
    ("fp8_recipes", "fp8-recipes/src/lib.rs"),
    ("fp8", "src/lib.rs"),
    ("fp8_cli", "fp8-cli/src/main.rs"),
    ("fp8_test_support", "tests/support/src/lib.rs"),
    ("fp8_structure", "tests/structure/src/lib.rs"),
];

/// The rooms of a crate from the bottom up: a file may import from its own room and from those before it.
const ROOMS: &[(&str, &[&str])] = &[
    (
        "fp8-candle/src",
        &[
            "base", "device", "cast", "graph", "ops", "layers", "optim", "recorded",
        ],
    ),
    (
        "fp8-ranks/src",
        &[
            "error", "engine", "failure", "traffic", "sum", "single", "group", "graph", "sharded",
            "threads", "mesh", "launcher", "mpi", "nccl", "world",
        ],
    ),
    (
        "fp8-files/src",
        &[
            "names",
            "spelling",
            "python_json",
            "atomic",
            "error",
            "check",
            "read",
            "safetensors_file",
            "scheme",
            "contents",
            "search",
            "load",
            "adapter",
            "audit",
            "rewrite",
        ],
    ),
    (
        "fp8-recipes/src",
        &[
            "macros",
            "warning",
            "config",
            "error",
            "stats",
            "autocast",
            "module",
            "array",
            "nn",
            "with_tracing",
            "timings",
            "prepare",
            "export",
            "scaled",
            "checkpoint",
            "train_state",
            "rewrite",
            "emulation",
        ],
    ),
    (
        "src/models",
        &[
            "error",
            "files",
            "text",
            "layers",
            "adapters",
            "families",
            "to_gguf",
            "generation",
            "unread",
            "open",
            "search",
        ],
    ),
    (
        "src/serving",
        &[
            "error", "options", "waiting", "reply", "request", "queue", "worker", "server",
        ],
    ),
    (
        "src/training",
        &[
            "data",
            "error",
            "learner",
            "objective",
            "config",
            "lines",
            "metrics",
            "progress",
            "turns",
            "plot",
            "stats",
            "folder",
            "trainer",
            "rows",
            "language_model",
            "encoder",
            "classify",
            "contrast",
            "vars",
            "initial",
            "base",
            "trained",
        ],
    ),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What the tests look at. The sources are read once.
struct Read {
    /// What the code of a file uses.
    used: Vec<Arrow>,
    /// What `pub use` lines hand on.
    handed_on: Vec<Arrow>,
    /// Source files that belong to no module.
    missing: Vec<PathBuf>,
}

static READ: LazyLock<Result<Read, String>> = LazyLock::new(|| {
    let root = workspace();
    let crates = CRATES.iter();
    let crates = crates.map(|(name, file)| Crate::read(name, &root.join(file)));
    let crates = crates.collect::<Result<Vec<_>, _>>()?;
    let mut missing = vec![];
    for (one, (_, file)) in crates.iter().zip(CRATES) {
        let folder = root.join(file).parent().expect("a folder").to_path_buf();
        let mut all = vec![];
        sources(&folder, &mut all).map_err(|error| error.to_string())?;
        let read = one.files();
        all.retain(|file| !read.contains(file.as_path()) && !one.is_test(file));
        missing.extend(all);
    }
    Ok(Read {
        used: short(Crate::arrows(&crates)),
        handed_on: short(Crate::handed_on(&crates)),
        missing,
    })
});

/// The arrows with paths from the workspace's folder.
fn short(arrows: Vec<Arrow>) -> Vec<Arrow> {
    let root = workspace();
    let short = |path: PathBuf| {
        path.strip_prefix(&root)
            .map(Path::to_path_buf)
            .unwrap_or(path)
    };
    let short = arrows.into_iter().map(|arrow| Arrow {
        from: short(arrow.from),
        to: short(arrow.to),
        names: arrow.names,
    });
    short.collect()
}

/// All `.rs` files in a folder and the folders in it, without those of a build and hidden ones.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if name == b"target" || name.starts_with(b".") {
            continue;
        }
        if path.is_dir() {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// A file that is not read could break every rule unseen.
#[test]
fn every_source_file_is_read() -> Result<(), String> {
    let read = READ.as_ref()?;
    assert!(read.missing.is_empty(), "{:?}", read.missing);
    Ok(())
}

/// Where libraries and programs may have unsafe code.
const UNSAFE: &[&str] = &[
    "fp8-candle/src/base",
    "fp8-candle/src/device",
    "fp8-core/src/kernels",
    "fp8-ranks/src/failure.rs",
    "fp8-ranks/src/mpi",
    "fp8-ranks/src/nccl",
    "src/memory.rs",
    "tests/support/src/memory.rs",
];

#[test]
fn unsafe_code_is_where_it_may_be() -> Result<(), String> {
    // Split, so that these lines are none of what they look for.
    let begins = ["{", "fn ", "impl ", "extern "].map(|next| format!("unsafe{}{next}", " "));
    let (root, mut found) = (workspace(), String::new());
    for (_, file) in CRATES {
        let mut all = vec![];
        let folder = root.join(file).parent().expect("a folder").to_path_buf();
        sources(&folder, &mut all).map_err(|error| error.to_string())?;
        for file in all {
            let short = file.strip_prefix(&root).unwrap_or(&file);
            let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
            let code = |line: &&str| !line.trim_start().starts_with("//");
            let has = |line: &str| begins.iter().any(|begin| line.contains(begin));
            if !UNSAFE.iter().any(|place| short.starts_with(place))
                && text.lines().filter(code).any(has)
            {
                found += &format!("  {}\n", short.display());
            }
        }
    }
    assert!(found.is_empty(), "unsafe code elsewhere:\n{found}");
    Ok(())
}

/// A longer file has more than one concern.
#[test]
fn no_file_has_more_than_400_lines() -> std::io::Result<()> {
    let mut all = vec![];
    sources(&workspace(), &mut all)?;
    assert!(all.len() > 500, "only {} files were found", all.len());
    let mut found = String::new();
    for file in all {
        let lines = std::fs::read_to_string(&file)?.lines().count();
        if lines > 400 {
            found += &format!("  {} has {lines} lines\n", file.display());
        }
    }
    assert!(found.is_empty(), "too long:\n{found}");
    Ok(())
}

fn shown(arrow: &Arrow) -> String {
    let (from, to) = (arrow.from.display(), arrow.to.display());
    format!("  {from} imports {:?} from {to}\n", arrow.names)
}

#[test]
fn no_files_import_each_other() -> Result<(), String> {
    let arrows = &READ.as_ref()?.used;
    assert!(
        arrows.len() > 500,
        "only {} arrows were found",
        arrows.len()
    );
    let mut found = String::new();
    for circle in circles(arrows) {
        found += &format!("a circle of {} files:\n", circle.len());
        let within = |arrow: &&Arrow| {
            circle.contains(arrow.from.as_path()) && circle.contains(arrow.to.as_path())
        };
        found.extend(arrows.iter().filter(within).map(shown));
    }
    assert!(found.is_empty(), "{found}");
    Ok(())
}

/// The name of the room that `file` would be in, if `folder` holds it.
fn first_part(folder: &str, file: &Path) -> Option<String> {
    let inside = file.strip_prefix(folder).ok()?;
    let first = Path::new(inside.components().next()?.as_os_str());
    Some(first.file_stem()?.to_string_lossy().into_owned())
}

/// The order of rooms says nothing about a file that is in none of them.
#[test]
fn every_file_of_an_ordered_folder_has_a_room() -> Result<(), String> {
    let mut found = String::new();
    for (folder, rooms) in ROOMS {
        let mut all = vec![];
        sources(&workspace().join(folder), &mut all).map_err(|error| error.to_string())?;
        for file in all {
            let file = file.strip_prefix(workspace()).unwrap_or(&file);
            let first = first_part(folder, file).ok_or("a file outside of its folder")?;
            if !["lib", "mod"].contains(&&*first) && !rooms.contains(&&*first) {
                found += &format!("  {}\n", file.display());
            }
        }
        for room in *rooms {
            let path = workspace().join(folder).join(room);
            if !path.is_dir() && !path.with_extension("rs").is_file() {
                found += &format!("  {folder}: no file is in the room {room}\n");
            }
        }
    }
    assert!(found.is_empty(), "files without a room:\n{found}");
    Ok(())
}

#[test]
fn rooms_import_downward() -> Result<(), String> {
    let Read {
        used, handed_on, ..
    } = READ.as_ref()?;
    let (mut seen, mut found) = (0, String::new());
    for (folder, rooms) in ROOMS {
        let room = |file: &Path| {
            let first = first_part(folder, file)?;
            rooms.iter().position(|room| first == *room)
        };
        for arrow in used.iter().chain(handed_on) {
            let (Some(from), Some(to)) = (room(&arrow.from), room(&arrow.to)) else {
                continue;
            };
            seen += 1;
            if from < to {
                found += &shown(arrow);
            }
        }
    }
    assert!(seen > 200, "only {seen} arrows between files of rooms");
    assert!(found.is_empty(), "arrows upward:\n{found}");
    Ok(())
}

#[test]
fn circles_are_found() {
    let arrow = |from: &str, to: &str| Arrow {
        from: from.into(),
        to: to.into(),
        names: Default::default(),
    };
    let arrows = [
        arrow("a", "b"),
        arrow("b", "c"),
        arrow("c", "b"),
        arrow("c", "d"),
    ];
    let found = circles(&arrows);
    let expected = ["b", "c"].map(Path::new);
    assert_eq!(found, [expected.into_iter().collect()]);
}
