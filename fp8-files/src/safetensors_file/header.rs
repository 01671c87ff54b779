//! Parses the JSON header of a safetensors file, and rejects ambiguous names and sizes that overflow.
//!
//! The format's own library takes the last of two equal names, and accepts sizes whose product overflows later.

use crate::atomic::METADATA;
use crate::error::{Error, Result};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Parses and checks a header: names are unique, products of sizes do not overflow, offsets fit shapes and dtypes.
pub(super) fn parse(path: &Path, json: &[u8]) -> Result<Metadata> {
    let invalid = |reason: String| Error::NotSafetensors {
        path: path.to_path_buf(),
        reason: format!("bad header: {reason}"),
    };
    let repeated = |name: &str| Error::RepeatedName {
        path: path.to_path_buf(),
        name: name.to_string(),
    };
    let header: Object<Entry> =
        serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    if let Some(name) = header.repeated() {
        return Err(repeated(name));
    }
    let (mut metadata, mut tensors) = (None, vec![]);
    for (name, entry) in header.0 {
        match entry {
            Entry::Metadata(texts) => {
                if let Some(name) = texts.repeated() {
                    return Err(repeated(name));
                }
                metadata = Some(texts.0.into_iter().collect());
            }
            Entry::Tensor(info) if !is_computable(&info) => {
                return Err(Error::TensorShape {
                    tensor: name,
                    got: info.shape,
                    expected: "sizes whose product memory could hold".into(),
                });
            }
            Entry::Tensor(info) => tensors.push((name, info)),
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Metadata::new(metadata, tensors).map_err(|error| invalid(error.to_string()))
}

/// Whether no product of sizes, for strides or lengths, overflows. That matters for empty tensors too: the strides of `[0, 2^40, 2^40]`
/// overflow.
fn is_computable(info: &TensorInfo) -> bool {
    let sizes = info.shape.iter().map(|&size| size.max(1));
    let bits = sizes
        .chain([info.dtype.bitsize()])
        .try_fold(1usize, usize::checked_mul);
    bits.is_some_and(|bits| bits <= isize::MAX as usize)
}

/// The entries of a JSON object in their order, with repeated names.
struct Object<V>(Vec<(String, V)>);

impl<V> Object<V> {
    fn repeated(&self) -> Option<&str> {
        let mut seen = HashSet::new();
        let mut names = self.0.iter().map(|(name, _)| name.as_str());
        names.find(|name| !seen.insert(*name))
    }
}

/// A value of an object; its name decides how it is parsed.
trait Named: Sized {
    fn parse<'de, A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error>;
}

impl Named for String {
    fn parse<'de, A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }
}

/// An entry of the header.
enum Entry {
    Metadata(Object<String>),
    Tensor(TensorInfo),
}

impl Named for Entry {
    fn parse<'de, A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error> {
        match name {
            METADATA => map.next_value().map(Self::Metadata),
            _ => map.next_value().map(Self::Tensor),
        }
    }
}

impl<'de, V: Named> Deserialize<'de> for Object<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Named> Visitor<'de> for Entries<V> {
            type Value = Object<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<V>, A::Error> {
                let mut entries = vec![];
                while let Some(name) = map.next_key::<String>()? {
                    let value = V::parse(&name, &mut map)?;
                    entries.push((name, value));
                }
                Ok(Object(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}
