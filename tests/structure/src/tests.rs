//! Small crates in a temporary folder, and the arrows that must be found in them.

use crate::{Arrow, Crate};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A crate of these files, the root `lib.rs` among them.
fn crate_of(files: &[(&str, &str)]) -> (tempfile::TempDir, Crate) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
    let read = Crate::read("this", &dir.path().join("lib.rs")).expect("a crate");
    (dir, read)
}

/// `from -> to: names`, one line for each arrow.
fn shown(dir: &Path, arrows: Vec<Arrow>) -> Vec<String> {
    let short = |path: PathBuf| {
        let inside = path.strip_prefix(dir).expect("in the folder");
        inside.display().to_string()
    };
    let shown = arrows.into_iter().map(|arrow| {
        let names: Vec<String> = arrow.names.into_iter().collect();
        let (from, to) = (short(arrow.from), short(arrow.to));
        format!("{from} -> {to}: {}", names.join(" "))
    });
    shown.collect()
}

/// The arrows of a crate of these files.
#[track_caller]
fn assert_arrows(files: &[(&str, &str)], expected: &[&str]) {
    let (dir, read) = crate_of(files);
    let found = shown(dir.path(), Crate::arrows(&[read]));
    assert_eq!(found, expected);
}

/// The arrows of the file `x.rs` with this text, beside a fixed set of modules.
#[track_caller]
fn assert_arrows_of_x(text: &str, expected: &[&str]) {
    let files = [
        ("lib.rs", "mod a; mod b; mod x; pub use a::Face;"),
        ("a/mod.rs", "mod inner; pub use inner::*; pub fn near() {}"),
        ("a/inner.rs", "pub struct Face; pub fn far() {}"),
        ("b.rs", "pub enum Kind { One } pub fn far() {}"),
        ("x.rs", text),
    ];
    assert_arrows(&files, expected);
}

#[test]
fn a_path_attribute_starts_where_the_compiler_starts() {
    let files = [
        (
            "lib.rs",
            r#"#[path = "odd/one.rs"] mod one; mod dir; mod file;"#,
        ),
        // A file that `#[path]` names has its modules beside it.
        ("odd/one.rs", "mod beside;"),
        ("odd/beside.rs", ""),
        ("dir/mod.rs", r#"#[path = "named.rs"] mod two;"#),
        ("dir/named.rs", ""),
        // Of a file that is not a `mod.rs`, the path starts in its own folder, not in that of its modules..
        (
            "file.rs",
            r#"#[path = "sibling.rs"] mod three; mod plain; mod inline { #[path = "deep.rs"] mod four; }"#,
        ),
        ("sibling.rs", ""),
        ("file/plain.rs", r#"#[path = "../up.rs"] mod five;"#),
        ("up.rs", ""),
        // .. and of an inline module, in that of its modules.
        ("file/inline/deep.rs", ""),
    ];
    let (dir, read) = crate_of(&files);
    let expected: BTreeSet<PathBuf> = files
        .iter()
        .map(|(name, _)| dir.path().join(name))
        .collect();
    let found: BTreeSet<PathBuf> = read.files().into_iter().map(Path::to_path_buf).collect();
    assert_eq!(found, expected);
}

#[test]
fn use_lines_of_every_form() {
    let inner = "x.rs -> a/inner.rs: Face";
    for text in [
        "use crate::a::Face;",
        "use crate::{a::{self, Face}, b};",
        "use super::a::{Face as Other};",
        "use crate::Face;",
        "use self::super::a::Face as _;",
        "mod inside { use super::super::Face; }",
        "use crate::a; fn f(_: a::Face) {}",
        "use super::a as other; fn f(_: other::Face) {}",
        "use super::*; fn f(_: Face) {}",
        "use crate::a::*; fn f(_: Face) {}",
        "pub use crate::a::Face; fn f(_: Face) {}",
    ] {
        assert_arrows_of_x(text, &[inner]);
    }
    assert_arrows_of_x("use crate::b::Kind::One;", &["x.rs -> b.rs: Kind"]);
    assert_arrows_of_x("use crate::a::{self};", &[]);
    assert_arrows_of_x("pub use crate::a::Face;", &[]);
}

#[test]
fn names_that_a_function_imports() {
    let inner = "x.rs -> a/inner.rs: far";
    for text in [
        "fn f() { use crate::a as local; local::far() }",
        "fn f() { use crate::a::*; { far() } }",
        "fn f() { use crate::b; { use crate::a as b; b::far() } }",
    ] {
        assert_arrows_of_x(text, &[inner]);
    }
}

#[test]
fn paths_in_macros_and_attributes() {
    let inner = "x.rs -> a/inner.rs: far";
    for text in [
        "fn f() { println!(\"{}\", crate::a::far()) }",
        "use crate::a; fn f() { assert!([1, a::far()].len() == 2) }",
        "macro_rules! call { ($x:expr) => { $crate::a::far($x) } }",
        "each! { use crate::a::{far}; }",
        "fn f() { all!(1..crate::a::far()) }",
        "struct S { #[serde(with = \"crate::a::far\")] x: u8 }",
    ] {
        assert_arrows_of_x(text, &[inner]);
    }
    // A field, and a fragment of a macro.
    assert_arrows_of_x("use super::a::*; fn f() { all!(x.far, 'far) }", &[]);
    assert_arrows_of_x("macro_rules! call { ($far:expr) => { $far } }", &[]);
}

#[test]
fn macros_need_no_import() {
    let files = [
        (
            "lib.rs",
            "macro_rules! above { () => {} } mod deep; mod user;",
        ),
        ("deep/mod.rs", "mod exports;"),
        (
            "deep/exports.rs",
            "#[macro_export] macro_rules! exported { () => {} }",
        ),
        ("user.rs", "above!(); fn f() { crate::exported!() }"),
    ];
    let expected = [
        "user.rs -> deep/exports.rs: exported",
        "user.rs -> lib.rs: above",
    ];
    assert_arrows(&files, &expected);
}

#[test]
fn a_module_and_a_function_of_one_name() {
    let files = [
        ("lib.rs", "mod graph; mod user; mod other;"),
        ("graph/mod.rs", "mod attach; pub use attach::attach;"),
        ("graph/attach.rs", "pub fn attach() {} pub struct Ready;"),
        ("other.rs", "use crate::graph::attach::Ready;"),
        ("user.rs", "use crate::graph::attach;"),
    ];
    let expected = [
        "other.rs -> graph/attach.rs: Ready",
        "user.rs -> graph/attach.rs: attach",
    ];
    assert_arrows(&files, &expected);
}

#[test]
fn globs_in_a_circle_end() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use a::*; pub use b::*;"),
        ("a.rs", "use super::*; fn f() { missing(); there() }"),
        ("b.rs", "use super::*; pub fn there() { missing() }"),
    ];
    assert_arrows(&files, &["a.rs -> b.rs: there"]);
}

#[test]
fn test_code_is_left_out() {
    let files = [
        ("lib.rs", "mod a; mod x;"),
        ("a.rs", "pub fn far() {}"),
        (
            "x.rs",
            "#[cfg(test)] mod tests; #[cfg(all(test, unix))] mod more { use crate::a::far; } #[cfg(test)] struct S(crate::a::far);",
        ),
        ("x/tests.rs", "use crate::a::far;"),
    ];
    let (dir, read) = crate_of(&files);
    let is_test = |file: &str| read.is_test(&dir.path().join(file));
    assert!(is_test("x/tests.rs") && is_test("x/tests/more.rs") && !is_test("x.rs"));
    assert_arrows(&files, &[]);
    let files = [
        files[0],
        files[1],
        ("x.rs", "#[cfg(not(test))] use crate::a::far;"),
    ];
    assert_arrows(&files, &["x.rs -> a.rs: far"]);
}

#[test]
fn names_handed_on() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        (
            "a.rs",
            "pub use crate::b::far as near; pub(crate) use super::b::*;",
        ),
        ("b.rs", "pub fn far() {}"),
    ];
    assert_arrows(&files, &[]);
    let (dir, read) = crate_of(&files);
    let found = shown(dir.path(), Crate::handed_on(&[read]));
    assert_eq!(found, ["a.rs -> b.rs: b far"]);
}
