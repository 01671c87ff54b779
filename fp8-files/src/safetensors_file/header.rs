//! The JSON header of a safetensors file, read so that nothing in it is ambiguous or too large.
//!
//! The format's own library lets the last of two equal names win and leaves sizes whose product overflows to whoever
//! computes it.

use crate::error::{Error, Result};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

/// Key of the metadata.
const METADATA: &str = "__metadata__";

/// Parses and checks a header: names are unique, sizes can be computed with, offsets fit shapes and dtypes.
pub(super) fn parse(path: &Path, json: &[u8]) -> Result<Metadata> {
    let invalid = |reason: String| Error::NotSafetensors {
        path: path.to_path_buf(),
        reason,
    };
    let header: Header =
        serde_json::from_slice(json).map_err(|e| invalid(format!("bad header: {e}")))?;
    if let Some(name) = header.repeated {
        return Err(Error::RepeatedName {
            path: path.to_path_buf(),
            name,
        });
    }
    for (name, info) in &header.tensors {
        if !is_computable(info) {
            return Err(Error::TensorShape {
                tensor: name.clone(),
                got: info.shape.clone(),
                expected: "sizes whose product memory could hold".into(),
            });
        }
    }
    let mut tensors = header.tensors;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Metadata::new(header.metadata, tensors).map_err(|e| invalid(format!("bad header: {e}")))
}

/// Whether every product of sizes that strides or lengths may take fits into memory. Empty tensors count too: the
/// strides of `[0, 2^40, 2^40]` overflow.
fn is_computable(info: &TensorInfo) -> bool {
    let sizes = info.shape.iter().map(|&size| size.max(1));
    let bits = sizes
        .chain([info.dtype.bitsize()])
        .try_fold(1usize, usize::checked_mul);
    bits.is_some_and(|bits| bits <= isize::MAX as usize)
}

#[derive(Default)]
struct Header {
    metadata: Option<HashMap<String, String>>,
    tensors: Vec<(String, TensorInfo)>,
    /// The first name that came twice.
    repeated: Option<String>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        header.repeated.get_or_insert(name.clone());
                    }
                    if name == METADATA {
                        let texts: Texts = map.next_value()?;
                        if let Some(repeated) = texts.repeated {
                            header.repeated.get_or_insert(repeated);
                        }
                        header.metadata = Some(texts.entries);
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// The metadata: names and texts.
struct Texts {
    entries: HashMap<String, String>,
    repeated: Option<String>,
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
                let mut texts = Texts {
                    entries: HashMap::new(),
                    repeated: None,
                };
                while let Some((name, text)) = map.next_entry::<String, String>()? {
                    if texts.entries.insert(name.clone(), text).is_some() {
                        texts.repeated.get_or_insert(name);
                    }
                }
                Ok(texts)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
