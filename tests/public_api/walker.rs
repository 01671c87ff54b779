//! The walker on a small crate.

use crate::listing::{Entry, list};
use crate::source::Source;
use crate::{differences, documented};
use std::fs;

const ROOT: &str = r#"
//! A crate.
mod inner;
pub mod open;
#[cfg(test)]
mod tests;
macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $value:expr) => {
        $(#[$doc])*
        pub struct $name(u8);
        impl $name {
            /// The value.
            pub const fn get(self) -> u8 { $value + self.0 }
        }
    };
}
number! {
    /// One.
    One, 1
}
pub use inner::{Shape, area as surface};
pub use inner::deep::*;
pub use other::*;
pub use missing::Thing as Renamed;
pub use inner::Made;
"#;

const INNER: &str = r#"
pub mod deep { pub const SIZE: usize = 4; fn private() {} }
/// A shape.
///
/// ```
/// let _ = 1;
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Shape { Point, Line(#[from] f32, f32), Box { side: f32 } }
impl Shape {
    pub fn scaled<'a, T: Into<f32>>(
        &'a self,
        by: T,
    ) -> Result<Self, Box<dyn std::error::Error>> where T: Copy { loop {} }
    fn hidden(&self) {}
}
impl From<Shape> for f32 { fn from(_: Shape) -> f32 { 0. } }
pub fn area(shape: &Shape, scales: [f32; 2], with: impl Fn(f32) -> (f32, f32)) -> f32 { 0. }
pub struct NotReached;
"#;

const OPEN: &str = r#"
use crate::inner::Shape;
pub use crate::inner::Shape as Form;
pub trait Draw: Sized { type Pen: Clone; fn draw(&self) -> Self::Pen; fn twice(&self) {} }
impl Draw for Shape { type Pen = (); fn draw(&self) {} }
impl<T: Draw> Draw for Vec<T> { type Pen = T::Pen; fn draw(&self) -> T::Pen { loop {} } }
pub struct Canvas { pub width: usize, pixels: Vec<u8> }
#[cfg(feature = "gpu")]
pub unsafe fn upload(canvas: *const Canvas) {}
"#;

const EXPECTED: &str = "\
pub use other::* as small::*
impl Clone for small::Shape
impl Debug for small::Shape
impl Draw for small::Shape
impl From<Shape> for f32
#[non_exhaustive] pub enum small::Shape
small::Shape::Box
small::Shape::Box::side: f32
small::Shape::Line(f32, f32)
small::Shape::Point
pub fn small::Shape::scaled<'a, T: Into<f32>>(&'a self, by: T) -> Result<Self, Box<dyn std::error::Error>> where T: Copy
pub struct small::One { .. }
pub const fn small::One::get(self) -> u8
pub const small::SIZE: usize
pub use missing::Thing as small::Renamed
pub use inner::Made as small::Made (made by a macro)
pub fn small::surface(shape: &Shape, scales: [f32; 2], with: impl Fn(f32) -> (f32, f32)) -> f32
pub mod small::open
pub struct small::open::Canvas { .. }
small::open::Canvas::width: usize
pub trait small::open::Draw: Sized
impl<T: Draw> Draw for Vec<T>
type small::open::Draw::Pen: Clone
fn small::open::Draw::draw(&self) -> Self::Pen
fn small::open::Draw::twice(&self) { .. }
pub use small::Shape as small::open::Form
#[cfg(feature = \"gpu\")] pub unsafe fn small::open::upload(canvas: *const Canvas)";

fn small() -> Vec<Entry> {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, text) in [("lib.rs", ROOT), ("inner.rs", INNER), ("open.rs", OPEN)] {
        fs::write(dir.path().join(name), text).expect("a file");
    }
    list(&Source::read("small", &dir.path().join("lib.rs")).expect("sources"))
}

#[test]
fn everything_that_users_reach_is_listed() {
    let found = differences(EXPECTED, &small());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn items_without_an_example_are_counted_by_kind() {
    let counts: Vec<_> = documented::without_example(&small())
        .into_iter()
        .map(|(kind, without)| (kind, without.len()))
        .collect();
    // `Shape` has one.
    let expected = [
        ("functions", 2),
        ("methods", 4),
        ("traits", 1),
        ("types", 2),
    ];
    assert_eq!(counts, expected);
}

#[test]
fn ceilings_are_read_as_they_are_written() {
    let text = "# A comment.\nfp8 functions 3\n";
    let ceilings = documented::parse(text).expect("ceilings");
    assert!(documented::print(&ceilings).ends_with("fp8 functions 3\n"));
    let error = documented::parse("fp8 3").expect_err("two words");
    assert!(error.contains("`fp8 3`"), "{error}");
}

#[test]
fn sources_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("lib.rs");
    for (text, part) in [("mod gone;", "gone"), ("fn {", "lib.rs")] {
        fs::write(&root, text).expect("a file");
        let error = Source::read("bad", &root).err().expect("an error");
        assert!(error.contains(part), "{error}");
    }
}
