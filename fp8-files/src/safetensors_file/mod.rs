//! A safetensors file that is read tensor by tensor.

mod header;
mod positioned;

use crate::error::{Error, Result};
use crate::read::open_regular;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use positioned::Positioned;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes to read at a time; a multiple of the size of every number.
const PIECE: usize = 1 << 18;

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
    file: Positioned,
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
    /// Each of its rows is so many rows of the stored tensor after the one before it: 1 where they follow each other.
    pub(crate) step: usize,
}

impl SafetensorsFile {
    /// Reads and checks the header.
    ///
    /// # Errors
    /// [`Error::Read`] or [`Error::NotARegularFile`] for a file that cannot be opened, [`Error::NotSafetensors`],
    /// [`Error::RepeatedName`] or [`Error::TensorShape`] for a header that is malformed or does not fit the file's length.
    pub fn open(path: &Path) -> Result<Self> {
        let io = Error::read(path);
        let invalid = |reason: String| Error::NotSafetensors {
            path: path.to_path_buf(),
            reason,
        };
        let mut file = open_regular(path)?;
        let length = file.metadata().map_err(&io)?.len();
        if length < 8 {
            return Err(invalid(format!("{length} bytes are too few for a header")));
        }
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(&io)?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > MAX_HEADER || header_len > length - 8 {
            return Err(invalid(format!(
                "the header claims {header_len} bytes, the file has {length}"
            )));
        }
        let mut json = vec![];
        Read::by_ref(&mut file)
            .take(header_len)
            .read_to_end(&mut json)
            .map_err(io)?;
        let header = header::parse(path, &json)?;
        let start = 8 + header_len;
        let expected = start
            .checked_add(header.data_len() as u64)
            .ok_or_else(|| invalid("its header describes more data than a file can hold".into()))?;
        if length != expected {
            let fault = if length < expected {
                "truncated"
            } else {
                "too long"
            };
            return Err(invalid(format!(
                "{fault}: {length} bytes, the header describes {expected}"
            )));
        }
        Ok(Self {
            path: path.to_path_buf(),
            file: Positioned::new(file),
            header,
            cut: HashSet::new(),
            pieces: BTreeMap::new(),
            start,
        })
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

    /// The step from row to row of a piece whose rows do not follow each other; None for any other tensor.
    fn scattered(&self, name: &str) -> Option<usize> {
        let step = self.pieces.get(name)?.step;
        (step > 1).then_some(step)
    }

    /// The bytes of a tensor, as stored.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if no tensor has that name; [`Error::Read`].
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let (begin, end) = self.info(name)?.data_offsets;
        let mut bytes = vec![0; end - begin];
        self.read_at(begin, &mut bytes)?;
        let (Some(step), [rows, ..]) = (self.scattered(name), self.info(name)?.shape.as_slice())
        else {
            return Ok(bytes);
        };
        let row = bytes.len() / (rows.saturating_sub(1) * step + 1);
        let rows = bytes.chunks(row.max(1)).step_by(step);
        Ok(rows.flatten().copied().collect())
    }

    /// A tensor as stored. Its numbers are read into its own memory piece by piece, so there is never a second copy of them.
    ///
    /// # Errors
    /// As [`SafetensorsFile::bytes`]; [`Error::TensorDType`] for a dtype that candle does not have.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        let (shape, at) = (info.shape.as_slice(), info.data_offsets);
        let is_whole = self.scattered(name).is_none();
        let tensor = match info.dtype {
            _ if !is_whole => {
                Tensor::from_raw_buffer(&self.bytes(name)?, self.candle_dtype(name)?, shape, device)
            }
            Dtype::F32 => Tensor::from_vec(self.numbers(at, f32::from_le_bytes)?, shape, device),
            Dtype::BF16 => Tensor::from_vec(self.numbers(at, bf16::from_le_bytes)?, shape, device),
            Dtype::F16 => Tensor::from_vec(self.numbers(at, f16::from_le_bytes)?, shape, device),
            Dtype::F64 => Tensor::from_vec(self.numbers(at, f64::from_le_bytes)?, shape, device),
            Dtype::U8 => Tensor::from_vec(self.bytes(name)?, shape, device),
            Dtype::U32 => Tensor::from_vec(self.numbers(at, u32::from_le_bytes)?, shape, device),
            Dtype::I64 => Tensor::from_vec(self.numbers(at, i64::from_le_bytes)?, shape, device),
            _ => {
                let dtype = self.candle_dtype(name)?;
                Tensor::from_raw_buffer(&self.bytes(name)?, dtype, shape, device)
            }
        };
        Ok(tensor?)
    }

    fn candle_dtype(&self, name: &str) -> Result<DType> {
        let dtype = self.info(name)?.dtype;
        DType::try_from(dtype).map_err(|_| Error::TensorDType {
            tensor: name.to_string(),
            got: format!("{dtype:?}"),
            expected: "a dtype that candle has".into(),
        })
    }

    fn numbers<T, const SIZE: usize>(
        &self,
        (begin, end): (usize, usize),
        number: impl Fn([u8; SIZE]) -> T,
    ) -> Result<Vec<T>> {
        let mut numbers = Vec::with_capacity((end - begin) / SIZE);
        let mut piece = vec![0; PIECE.min(end - begin)];
        for at in (begin..end).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(end - at)];
            self.read_at(at, piece)?;
            let (elements, _) = piece.as_chunks::<SIZE>();
            numbers.extend(elements.iter().map(|bytes| number(*bytes)));
        }
        Ok(numbers)
    }

    /// Fills `bytes` with the data from offset `at`.
    fn read_at(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.start + at as u64;
        self.file
            .read_exact_at(bytes, at)
            .map_err(Error::read(&self.path))
    }
}

/// Whether the name of any tensor of these files fits.
pub(crate) fn any_name(files: &[&SafetensorsFile], fits: impl Fn(&str) -> bool) -> bool {
    files
        .iter()
        .any(|file| file.names().any(|name| fits(&name)))
}
