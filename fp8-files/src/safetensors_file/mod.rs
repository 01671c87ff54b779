//! A safetensors file that is read tensor by tensor.

mod bytes;
mod header;
mod positioned;
mod tensors;

use crate::error::{Error, Result};
use crate::read::open_regular;
use positioned::Positioned;
pub use positioned::ReadAt;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The format's limit for the header.
const MAX_HEADER: u64 = 100_000_000;

/// Metadata entry that names the format of a file's tensors.
pub const FORMAT_KEY: &str = "format";
/// The format of scaled tensors.
pub const SCALED_FORMAT: &str = "scaled";

/// An open file whose header has been checked against its length.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: Box<dyn ReadAt>,
    /// Bytes of the file.
    length: u64,
    header: Metadata,
    /// Tensors that are split into pieces, and the pieces, each with the name of the tensor it is part of.
    cut: HashSet<String>,
    pieces: BTreeMap<String, CutOut>,
    /// Where the data begins.
    start: u64,
}

/// A piece with its place in the file.
#[derive(Debug)]
struct CutOut {
    /// Its bytes are from its first row to its last, with the rows between that do not belong to it.
    info: TensorInfo,
    step: usize,
    /// The tensor it is part of.
    whole: String,
}

/// A part of a stored tensor that has its own name.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The index of its first element in the stored tensor.
    pub(crate) first: usize,
    /// The distance, in rows of the stored tensor, from each of its rows to the next: 1 if they follow each other.
    pub(crate) step: usize,
}

impl SafetensorsFile {
    /// Reads and checks the header.
    ///
    /// # Errors
    /// [`Error::Read`] or [`Error::NotARegularFile`] for a file that cannot be opened, [`Error::NotSafetensors`],
    /// [`Error::RepeatedName`] or [`Error::TensorShape`] for a header that is malformed or does not fit the file's length.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path)?;
        let length = file.metadata().map_err(Error::read(path))?.len();
        let file = Self::of_reader(path, Box::new(Positioned::new(file)), length)?;
        let expected = file.expected_length();
        if length == expected {
            return Ok(file);
        }
        let fault = if length < expected {
            "truncated"
        } else {
            "too long"
        };
        Err(file.invalid(format!(
            "{fault}: {length} bytes, the header describes {expected}"
        )))
    }

    /// Reads and checks the header of a file of `length` bytes, which may be fewer or more than the header describes.
    pub(crate) fn of_reader(path: &Path, file: Box<dyn ReadAt>, length: u64) -> Result<Self> {
        let io = Error::read(path);
        let invalid = |reason: String| Error::NotSafetensors {
            path: path.to_path_buf(),
            reason,
        };
        if length < 8 {
            return Err(invalid(format!("{length} bytes are too few for a header")));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(&io)?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > MAX_HEADER || header_len > length - 8 {
            return Err(invalid(format!(
                "the header claims {header_len} bytes, the file has {length}"
            )));
        }
        let mut json = vec![0; header_len as usize];
        file.read_exact_at(&mut json, 8).map_err(io)?;
        let header = header::parse(path, &json)?;
        let start = 8 + header_len;
        if start.checked_add(header.data_len() as u64).is_none() {
            let reason = "its header describes more data than a file can hold";
            return Err(invalid(reason.into()));
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            length,
            header,
            cut: HashSet::new(),
            pieces: BTreeMap::new(),
            start,
        })
    }

    /// The length that the file must have by its header: the header and the data.
    pub(crate) fn expected_length(&self) -> u64 {
        self.start + self.header.data_len() as u64
    }

    /// The bytes of the file.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Whether the file has all bytes of a tensor.
    pub(crate) fn is_whole(&self, name: &str) -> bool {
        let info = self.find(name);
        info.is_some_and(|info| self.check_end(info.data_offsets.1).is_ok())
    }

    fn invalid(&self, reason: String) -> Error {
        Error::NotSafetensors {
            path: self.path.clone(),
            reason,
        }
    }

    /// Replaces the tensor called `name` by `pieces` of it.
    pub(crate) fn cut(&mut self, name: &str, pieces: Vec<Piece>) -> Result<()> {
        let TensorInfo {
            dtype,
            data_offsets: (begin, _),
            ..
        } = *self.info(name)?;
        let bits = dtype.bitsize();
        for piece in pieces {
            if self.find(&piece.name).is_some() {
                return Err(Error::Ambiguous {
                    path: self.path.clone(),
                    tensor: piece.name.clone(),
                    first: piece.name,
                    second: name.to_string(),
                });
            }
            let begin = begin + piece.first * bits / 8;
            let (rows, row) = match piece.shape.as_slice() {
                [rows, across @ ..] if piece.step > 1 => (*rows, across.iter().product()),
                shape => (1, shape.iter().product::<usize>()),
            };
            let elements = match rows {
                0 => 0,
                rows => ((rows - 1) * piece.step + 1) * row,
            };
            let info = TensorInfo {
                dtype,
                shape: piece.shape,
                data_offsets: (begin, begin + elements * bits / 8),
            };
            let cut_out = CutOut {
                info,
                step: piece.step,
                whole: name.to_string(),
            };
            self.pieces.insert(piece.name, cut_out);
        }
        self.cut.insert(name.to_string());
        Ok(())
    }

    /// The stored tensor of which `name` is a piece, and its shape.
    pub(crate) fn whole(&self, name: &str) -> Option<(&str, &[usize])> {
        let CutOut { whole, .. } = self.pieces.get(name)?;
        Some((whole, &self.header.info(whole)?.shape))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = String> + use<> {
        let mut names = self.header.offset_keys();
        names.retain(|name| !self.cut.contains(name));
        names.extend(self.pieces.keys().cloned());
        names.sort();
        names.into_iter()
    }

    /// Dtype of a tensor; None if no tensor has that name.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        Some(self.find(name)?.dtype)
    }

    /// Shape of a tensor; None if no tensor has that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.find(name)?.shape)
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        match self.pieces.get(name) {
            Some(cut_out) => Some(&cut_out.info),
            None if self.cut.contains(name) => None,
            None => self.header.info(name),
        }
    }

    /// All metadata entries.
    pub(crate) fn all_metadata(&self) -> impl Iterator<Item = (&String, &String)> {
        self.header.metadata().iter().flatten()
    }

    /// A metadata entry; None if none has that name.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// Whether the metadata say that the file holds scaled tensors: data with a scale beside each.
    pub fn is_scaled(&self) -> bool {
        self.metadata(FORMAT_KEY) == Some(SCALED_FORMAT)
    }

    /// The error for a tensor whose shape differs from `expected`.
    pub(crate) fn wrong_shape(&self, name: &str, expected: impl Display) -> Error {
        Error::TensorShape {
            tensor: name.to_string(),
            got: self.shape(name).unwrap_or_default().to_vec(),
            expected: self.with_place(expected),
        }
    }

    /// The error for a tensor whose dtype differs from `expected`.
    pub(crate) fn wrong_dtype(&self, name: &str, expected: impl Display) -> Error {
        let got = self.dtype(name);
        Error::TensorDType {
            tensor: name.to_string(),
            got: got.map_or("missing".into(), |got| format!("{got:?}")),
            expected: self.with_place(expected),
        }
    }

    /// The error for an element of a tensor that is not `expected`.
    pub(crate) fn wrong_value(
        &self,
        name: &str,
        index: usize,
        value: impl Into<f64>,
        expected: impl Display,
    ) -> Error {
        Error::TensorValue {
            tensor: name.to_string(),
            index,
            value: value.into(),
            expected: self.with_place(expected),
        }
    }

    fn with_place(&self, expected: impl Display) -> String {
        format!("{expected}, in {}", self.path.display())
    }

    /// Shape and dtype of a tensor, and where its bytes are in the file.
    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.find(name).ok_or_else(|| Error::MissingTensor {
            tensor: name.to_string(),
            place: self.path.display().to_string(),
        })
    }
}

/// Whether the name of any tensor of these files fits.
pub(crate) fn any_name(files: &[&SafetensorsFile], fits: impl Fn(&str) -> bool) -> bool {
    files
        .iter()
        .any(|file| file.names().any(|name| fits(&name)))
}

/// A local file that is read at positions.
pub(crate) fn local_reader(file: std::fs::File) -> Box<dyn ReadAt> {
    Box::new(Positioned::new(file))
}
