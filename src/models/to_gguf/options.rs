//! How a GGUF file is written.

use fp8_core::setters;
use std::fmt;
use std::str::FromStr;

/// How the matrices of a GGUF file are stored. Norms, biases, routers of experts and position tables are f32 in any case.
///
/// ```
/// use fp8::models::gguf::GgufType;
/// assert_eq!("q8_0".parse::<GgufType>()?, GgufType::Q8_0);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufType {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    BF16,
    /// Blocks of 32 values: a scale in f16, which is the block's amax / 127, and whole numbers from -127 to 127. Matrices whose rows
    /// do not divide into blocks become f16, as in llama.cpp.
    #[default]
    Q8_0,
}

impl GgufType {
    const ALL: [(Self, &'static str, u32); 4] = [
        (Self::F32, "f32", 0),
        (Self::F16, "f16", 1),
        (Self::BF16, "bf16", 32),
        (Self::Q8_0, "q8_0", 7),
    ];

    /// Its name, and the number of `general.file_type`.
    pub(super) fn entry(self) -> (&'static str, u32) {
        let entry = Self::ALL.iter().find(|(kind, ..)| *kind == self);
        entry.map_or(("f32", 0), |(_, name, number)| (name, *number))
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry().0)
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut all = Self::ALL.iter();
        let found = all.find(|(_, name, _)| text.eq_ignore_ascii_case(name));
        let error = || format!("`{text}` is not f32, f16, bf16 or q8_0");
        found.map(|(kind, ..)| *kind).ok_or_else(error)
    }
}

/// Options of [`write_gguf`](crate::models::gguf::write_gguf).
///
/// ```
/// use fp8::models::gguf::{GgufOptions, GgufType};
/// let options = GgufOptions::new(GgufType::BF16).with_name("My model").with_overwrite(true);
/// assert_eq!(options.name.as_deref(), Some("My model"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufOptions {
    /// How matrices are stored.
    pub tensor_type: GgufType,
    /// The name of the model; by default that of its directory.
    pub name: Option<String>,
    /// llama.cpp's name of the rule by which the tokenizer splits text (`tokenizer.ggml.pre`); by default recognized.
    pub pre_tokenizer: Option<String>,
    /// Whether an existing file is replaced. Default no.
    pub overwrite: bool,
}

impl GgufOptions {
    /// The defaults.
    pub fn new(tensor_type: GgufType) -> Self {
        Self {
            tensor_type,
            ..Self::default()
        }
    }

    /// See [`GgufOptions::name`].
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// See [`GgufOptions::pre_tokenizer`].
    #[must_use]
    pub fn with_pre_tokenizer(mut self, name: impl Into<String>) -> Self {
        self.pre_tokenizer = Some(name.into());
        self
    }
}

setters! { GgufOptions:
    /// See [`GgufOptions::overwrite`].
    with_overwrite(overwrite: bool);
}
