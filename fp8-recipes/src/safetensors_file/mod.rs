//! One safetensors file, read tensor by tensor.

mod header;

use crate::error::{Error, Result};
use crate::read::open_regular;
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The format's own limit of the header.
const MAX_HEADER: u64 = 100_000_000;

/// An open file whose header has been checked against its length.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    path: PathBuf,
    file: Mutex<File>,
    header: Metadata,
    /// Where the data begins.
    start: u64,
}

impl SafetensorsFile {
    /// Reads and checks the header.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Read {
            path: path.to_path_buf(),
            source,
        };
        let invalid = |reason: String| Error::NotSafetensors {
            path: path.to_path_buf(),
            reason,
        };
        let mut file = open_regular(path)?;
        let length = file.metadata().map_err(io)?.len();
        if length < 8 {
            return Err(invalid(format!("{length} bytes are too few for a header")));
        }
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(io)?;
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
            file: Mutex::new(file),
            header,
            start,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = String> + use<> {
        let mut names = self.header.offset_keys();
        names.sort();
        names.into_iter()
    }

    pub(crate) fn dtype(&self, name: &str) -> Option<Dtype> {
        Some(self.header.info(name)?.dtype)
    }

    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.header.info(name)?.shape)
    }

    /// All metadata entries.
    pub(crate) fn all_metadata(&self) -> impl Iterator<Item = (&String, &String)> {
        self.header.metadata().iter().flatten()
    }

    pub(crate) fn metadata(&self, key: &str) -> Option<&str> {
        self.header
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// The stored tensor.
    pub(crate) fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        let info: &TensorInfo = self.header.info(name).ok_or_else(|| Error::MissingTensor {
            tensor: name.to_string(),
            place: self.path.display().to_string(),
        })?;
        let dtype = DType::try_from(info.dtype).map_err(|_| Error::TensorDType {
            tensor: name.to_string(),
            got: format!("{:?}", info.dtype),
            expected: "a dtype that candle has".into(),
        })?;
        let (begin, end) = info.data_offsets;
        let mut bytes = vec![0; end - begin];
        {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            file.seek(SeekFrom::Start(self.start + begin as u64))
                .and_then(|_| file.read_exact(&mut bytes))
                .map_err(|source| Error::Read {
                    path: self.path.clone(),
                    source,
                })?;
        }
        Ok(Tensor::from_raw_buffer(&bytes, dtype, &info.shape, device)?)
    }
}
