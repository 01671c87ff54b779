//! Images with labels: Fashion-MNIST (or MNIST) in IDX files, or the 8x8 digits that come with the program.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use flate2::read::GzDecoder;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Where Debian's package `dataset-fashion-mnist` puts its files.
const DEBIAN: &str = "/usr/share/datasets/fashion-mnist";
/// The UCI optical digits; the first [`DIGITS_FOR_TRAINING`] are for training.
const DIGITS: &[u8] = include_bytes!("../../tests/golden/digits.safetensors");
const DIGITS_FOR_TRAINING: usize = 1437;
pub const CLASSES: usize = 10;

/// Images `[count, 1, size, size]` in f32 with mean 0 and deviation 1 over the training set, and labels u32 `[count]`.
pub struct Split {
    pub images: Tensor,
    pub labels: Tensor,
}

impl Split {
    pub fn len(&self) -> usize {
        self.labels.elem_count()
    }

    fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        Ok(Self {
            images: self.images.to_device(device)?,
            labels: self.labels.to_device(device)?,
        })
    }
}

pub struct Data {
    pub name: &'static str,
    /// Rows and columns of an image.
    pub size: usize,
    pub train: Split,
    pub test: Split,
}

impl Data {
    /// Loads the images of a folder; without one, Debian's or else the digits. The folder `digits` means the digits.
    pub fn load(folder: Option<&Path>) -> Result<Self> {
        let debian = Path::new(DEBIAN);
        match folder {
            Some(name) if name == Path::new("digits") => Self::digits(),
            Some(folder) => Self::idx(folder),
            None if debian.is_dir() => Self::idx(debian),
            None => Self::digits(),
        }
    }

    /// Moves all images to `device`, where training then runs.
    pub fn on_device(self, device: &Device) -> candle_core::Result<Self> {
        Ok(Self {
            train: self.train.to_device(device)?,
            test: self.test.to_device(device)?,
            ..self
        })
    }

    fn digits() -> Result<Self> {
        let tensors = candle_core::safetensors::load_buffer(DIGITS, &Device::Cpu)?;
        let bytes = |name: &str| -> Result<Vec<u8>> { Ok(tensors[name].flatten_all()?.to_vec1()?) };
        let (images, labels) = (bytes("images")?, bytes("labels")?);
        let (train, test) = images.split_at(DIGITS_FOR_TRAINING * 64);
        let (train_labels, test_labels) = labels.split_at(DIGITS_FOR_TRAINING);
        Self::new("digits", 8, (train, train_labels), (test, test_labels))
    }

    fn idx(folder: &Path) -> Result<Self> {
        let split = |name: &str| -> Result<(usize, Vec<u8>, Vec<u8>)> {
            let (dims, images) = read_idx(folder, &format!("{name}-images-idx3-ubyte"))?;
            let (label_dims, labels) = read_idx(folder, &format!("{name}-labels-idx1-ubyte"))?;
            let &[count, rows, cols] = dims.as_slice() else {
                bail!("images of {name}: {} dimensions, expected 3", dims.len());
            };
            ensure!(
                rows == cols && label_dims == [count],
                "{name}: {count} images of {rows}x{cols} and labels {label_dims:?}, expected square images with a label each"
            );
            Ok((rows, images, labels))
        };
        let (size, images, labels) = split("train")?;
        let (test_size, test_images, test_labels) = split("t10k")?;
        ensure!(
            size == test_size,
            "images of {size} for training, of {test_size} for testing"
        );
        let test = (test_images.as_slice(), test_labels.as_slice());
        Self::new("images", size, (&images, &labels), test)
    }

    fn new(
        name: &'static str,
        size: usize,
        train: (&[u8], &[u8]),
        test: (&[u8], &[u8]),
    ) -> Result<Self> {
        ensure!(!train.1.is_empty(), "{name}: no images to train with");
        let count = train.0.len() as f64;
        let mean = train.0.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let squares = train.0.iter().map(|&x| (f64::from(x) - mean).powi(2));
        let deviation = (squares.sum::<f64>() / count).sqrt().max(1e-6);
        let split = |(images, labels): (&[u8], &[u8])| -> Result<Split> {
            if let Some(label) = labels.iter().find(|&&label| usize::from(label) >= CLASSES) {
                bail!("{name}: label {label}, expected 0 to 9");
            }
            let shape = (labels.len(), 1, size, size);
            let images = Tensor::from_slice(images, shape, &Device::Cpu)?;
            Ok(Split {
                images: images
                    .to_dtype(DType::F32)?
                    .affine(1. / deviation, -mean / deviation)?,
                labels: Tensor::from_slice(labels, labels.len(), &Device::Cpu)?
                    .to_dtype(DType::U32)?,
            })
        };
        Ok(Self {
            name,
            size,
            train: split(train)?,
            test: split(test)?,
        })
    }
}

/// Dimensions and bytes of `folder/name` or `folder/name.gz`.
fn read_idx(folder: &Path, name: &str) -> Result<(Vec<usize>, Vec<u8>)> {
    let (plain, packed) = (folder.join(name), folder.join(format!("{name}.gz")));
    let open = |path: &PathBuf| File::open(path).with_context(|| path.display().to_string());
    let mut bytes = vec![];
    let path = match plain.exists() {
        true => {
            open(&plain)?.read_to_end(&mut bytes)?;
            plain
        }
        false => {
            let file = open(&packed).with_context(|| {
                format!("{} holds neither {name} nor {name}.gz", folder.display())
            })?;
            GzDecoder::new(file)
                .read_to_end(&mut bytes)
                .with_context(|| packed.display().to_string())?;
            packed
        }
    };
    let parsed = parse_idx(&bytes);
    let (dims, data) =
        parsed.with_context(|| format!("{} is not an IDX file of bytes", path.display()))?;
    Ok((dims, data.to_vec()))
}

/// Two zeros, the type (8 for bytes), the number of dimensions, each dimension in big-endian, the values.
fn parse_idx(bytes: &[u8]) -> Result<(Vec<usize>, &[u8])> {
    let (&[zero, zero2, kind, rank], rest) = bytes.split_first_chunk().context("it is cut off")?;
    ensure!(
        (zero, zero2, kind) == (0, 0, 8),
        "it begins with {zero} {zero2} {kind}, expected 0 0 8"
    );
    let rank = usize::from(rank);
    ensure!(rest.len() >= 4 * rank, "it is cut off");
    let (dims, data) = rest.split_at(4 * rank);
    let dims: Vec<usize> = dims
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| u32::from_be_bytes(*bytes) as usize)
        .collect();
    let count = dims
        .iter()
        .try_fold(1usize, |count, &dim| count.checked_mul(dim));
    ensure!(
        count == Some(data.len()),
        "{} bytes of values, expected those of {dims:?}",
        data.len()
    );
    Ok((dims, data))
}
