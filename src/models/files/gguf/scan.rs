//! Checks the header of a GGUF file before candle reads it.
//!
//! candle's reader trusts the file: sizes may overflow, the alignment may be zero, the last of two tensors with one name wins, and an
//! unknown type has a number but no name. These checks reject all of that first.

use super::GgufError;
use std::collections::HashSet;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Depth of nested arrays; real files have none.
const MAX_DEPTH: usize = 4;
/// The maximum number of header entries, and of bytes in a string; the largest vocabularies have some 300 thousand entries.
const MAX_COUNT: u64 = 1 << 26;

/// The maximum number of values in all arrays together. A value takes some 30 bytes of memory; the largest vocabularies have one million.
const MAX_VALUES: u64 = 1 << 22;

/// Tensor types that candle reads: number, elements per block, bytes per block.
const READ_TYPES: [(u32, u64, u64); 15] = [
    (0, 1, 4),      // F32
    (1, 1, 2),      // F16
    (2, 32, 18),    // Q4_0
    (3, 32, 20),    // Q4_1
    (6, 32, 22),    // Q5_0
    (7, 32, 24),    // Q5_1
    (8, 32, 34),    // Q8_0
    (9, 32, 36),    // Q8_1
    (10, 256, 84),  // Q2_K
    (11, 256, 110), // Q3_K
    (12, 256, 144), // Q4_K
    (13, 256, 176), // Q5_K
    (14, 256, 210), // Q6_K
    (15, 256, 292), // Q8_K
    (30, 1, 2),     // BF16
];

/// Types that candle does not read, for messages.
const OTHER_TYPES: [(u32, &str); 26] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// A tensor as the header describes it.
struct Entry {
    name: String,
    dims: Vec<u64>,
    stored: u32,
    offset: u64,
}

/// Rejects files that candle's reader would misread. Returns the bytes of the header.
pub(super) fn check(path: &Path, file: impl Read + Seek) -> Result<u64, GgufError> {
    let mut header = Header::new(path, file)?;
    let (entries, alignment) = header.read()?;
    let length = header.reader.stream_position().map_err(io_error(path))?;
    let start = length.div_ceil(alignment).saturating_mul(alignment);
    let mut names = HashSet::new();
    let mut places = vec![];
    for entry in &entries {
        let broken = |reason: String| header.broken(format!("tensor `{}`: {reason}", entry.name));
        if !names.insert(&entry.name) {
            return broken("the name occurs twice".to_string());
        }
        let known = READ_TYPES.iter().find(|(id, ..)| *id == entry.stored);
        let Some((_, block, bytes)) = known else {
            return Err(GgufError::UnsupportedType {
                path: path.to_path_buf(),
                tensor: entry.name.clone(),
                stored: type_name(entry.stored),
            });
        };
        let mut dims = entry.dims.iter();
        let elements = dims.try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let Some(elements) = elements.filter(|n| *n > 0) else {
            return broken(format!("the shape {:?} is invalid", entry.dims));
        };
        let row = entry.dims.first().copied().unwrap_or(1);
        if row % block != 0 {
            return broken(format!("rows of {row} are not a multiple of {block}"));
        }
        let offset = entry.offset;
        let size = (elements / block).checked_mul(*bytes);
        let end = size.and_then(|size| size.checked_add(offset));
        let in_file = |end: &u64| end.checked_add(start).is_some_and(|end| end <= header.size);
        let Some(end) = end.filter(|end| offset % alignment == 0 && in_file(end)) else {
            return broken(format!(
                "{elements} elements at offset {offset} do not lie within the file"
            ));
        };
        places.push((offset, end, &entry.name));
    }
    places.sort_unstable();
    for pair in places.windows(2) {
        let ((_, end, first), (offset, _, second)) = (pair[0], pair[1]);
        if offset < end {
            return header.broken(format!(
                "tensor `{second}` begins at offset {offset}, within tensor `{first}`, which ends at {end}"
            ));
        }
    }
    Ok(length)
}

fn type_name(id: u32) -> String {
    match OTHER_TYPES.iter().find(|(other, _)| *other == id) {
        Some((_, name)) => format!("{name} (type {id})"),
        None => format!("type {id}"),
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> GgufError + use<> {
    let path = path.to_path_buf();
    move |source| match source.kind() {
        io::ErrorKind::UnexpectedEof => GgufError::Broken {
            path,
            reason: "the file ends within its header".to_string(),
        },
        _ => GgufError::Io { path, source },
    }
}

/// Reads the header sequentially.
struct Header<'a, R: Read + Seek> {
    path: &'a Path,
    reader: BufReader<R>,
    size: u64,
    /// Values of arrays so far.
    values: u64,
}

impl<'a, R: Read + Seek> Header<'a, R> {
    fn new(path: &'a Path, mut file: R) -> Result<Self, GgufError> {
        let size = file.seek(SeekFrom::End(0)).map_err(io_error(path))?;
        file.seek(SeekFrom::Start(0)).map_err(io_error(path))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        Ok(Self {
            path,
            reader,
            size,
            values: 0,
        })
    }

    fn broken<T>(&self, reason: String) -> Result<T, GgufError> {
        let path = self.path.to_path_buf();
        Err(GgufError::Broken { path, reason })
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), GgufError> {
        let read = self.reader.read_exact(bytes);
        read.map_err(io_error(self.path))
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self, what: &str) -> Result<u64, GgufError> {
        let count = self.u64()?;
        match count <= MAX_COUNT.min(self.size) {
            true => Ok(count),
            false => self.broken(format!("{count} as the number of {what}")),
        }
    }

    fn string(&mut self) -> Result<String, GgufError> {
        let length = self.count("bytes of a text")?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Skips a value; returns it if it is a small unsigned integer.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Option<u64>, GgufError> {
        match kind {
            0 => Ok(Some(self.bytes::<1>()?[0].into())),
            2 => Ok(Some(u16::from_le_bytes(self.bytes()?).into())),
            4 => Ok(Some(self.u32()?.into())),
            1 | 7 => self.bytes::<1>().map(|_| None),
            3 => self.bytes::<2>().map(|_| None),
            5 | 6 => self.bytes::<4>().map(|_| None),
            10..=12 => self.bytes::<8>().map(|_| None),
            8 => self.string().map(|_| None),
            9 if depth < MAX_DEPTH => {
                let kind = self.u32()?;
                let count = self.count("values of an array")?;
                self.values = self.values.saturating_add(count);
                if self.values > MAX_VALUES {
                    let values = self.values;
                    return self.broken(format!(
                        "its arrays have {values} values or more, at most {MAX_VALUES} are read"
                    ));
                }
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
                Ok(None)
            }
            _ => self.broken(format!("a value of kind {kind}")),
        }
    }

    /// The tensors and the alignment of their data.
    fn read(&mut self) -> Result<(Vec<Entry>, u64), GgufError> {
        if self.bytes()? != MAGIC {
            return self.broken("this is not a GGUF file".to_string());
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return self.broken(format!("version {version} of the format, 2 and 3 are read"));
        }
        let tensors = self.count("tensors")?;
        let metadata = self.count("metadata entries")?;
        let mut alignment = 32;
        let mut keys = HashSet::new();
        for _ in 0..metadata {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if key == "general.alignment" {
                alignment = match value {
                    Some(value) if value.is_power_of_two() => value,
                    _ => {
                        return self
                            .broken("`general.alignment` is not a power of two".to_string());
                    }
                };
            }
            if let Some(key) = keys.replace(key) {
                return self.broken(format!("the entry `{key}` occurs twice"));
            }
        }
        let mut entries = vec![];
        for _ in 0..tensors {
            let name = self.string()?;
            let rank = self.u32()?;
            if rank > 4 {
                return self.broken(format!("tensor `{name}` has {rank} dimensions"));
            }
            let dims = (0..rank).map(|_| self.u64()).collect::<Result<_, _>>()?;
            let (stored, offset) = (self.u32()?, self.u64()?);
            entries.push(Entry {
                name,
                dims,
                stored,
                offset,
            });
        }
        Ok((entries, alignment))
    }
}
