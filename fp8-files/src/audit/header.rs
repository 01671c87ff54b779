//! Why a file is not a safetensors file.

use super::fault::Fault;
use super::report::Finding;
use crate::error::{Error, Result};
use crate::safetensors_file::ReadAt;
use safetensors::Dtype;
use serde_json::Value;

/// The longest header whose entries are checked one by one: a parsed header takes many times its bytes.
const LONG: u64 = 16 << 20;

/// The first bytes of a file.
pub(super) fn start(reader: &dyn ReadAt, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length.min(64) as usize];
    match reader.read_exact_at(&mut bytes, 0) {
        Ok(()) => bytes,
        Err(_) => vec![],
    }
}

/// Adds the faults of the file called `name`, which was refused with `error`.
pub(super) fn diagnose(
    name: &str,
    start: &[u8],
    length: u64,
    error: &Error,
    open: impl FnOnce() -> Result<(Box<dyn ReadAt>, u64)>,
    faults: &mut Vec<Finding>,
) {
    if start.starts_with(b"version https://git-lfs") {
        let found = format!("the {length} bytes of a pointer");
        faults.push(Finding::new(Fault::LfsPointer, name, found, "the weights"));
        return;
    }
    let claimed = start.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let is_json = start.get(8) == Some(&b'{');
    if let Some(claimed) = claimed
        && is_json
        && claimed.checked_add(8).is_none_or(|end| end > length)
    {
        let found = format!("{length} bytes");
        let expected = format!("at least {}, for the header", claimed.saturating_add(8));
        faults.push(Finding::new(Fault::FileTruncated, name, found, expected));
        return;
    }
    if length < 9 {
        let found = format!("{length} bytes");
        let expected = "a header and data";
        faults.push(Finding::new(Fault::FileTruncated, name, found, expected));
        return;
    }
    match error {
        Error::RepeatedName { name: tensor, .. } => {
            let found = format!("twice in {name}");
            faults.push(Finding::new(Fault::NameRepeated, tensor, found, "once"));
            return;
        }
        Error::TensorShape {
            tensor,
            got,
            expected,
        } => {
            let found = format!("shape {got:?} in {name}");
            faults.push(Finding::new(Fault::HeaderInvalid, tensor, found, expected));
            return;
        }
        _ => {}
    }
    let entries = claimed.filter(|claimed| *claimed <= LONG);
    let entries = entries.and_then(|claimed| {
        let (reader, _) = open().ok()?;
        let mut json = vec![0; claimed as usize];
        reader.read_exact_at(&mut json, 8).ok()?;
        serde_json::from_slice::<Value>(&json).ok()
    });
    let before = faults.len();
    if let Some(Value::Object(entries)) = entries {
        for (tensor, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
            look_at(name, tensor, entry, faults);
        }
    }
    if faults.len() == before {
        let reason = match error {
            Error::NotSafetensors { reason, .. } => reason.clone(),
            error => error.to_string(),
        };
        let expected = "the header of a safetensors file";
        faults.push(Finding::new(Fault::HeaderInvalid, name, reason, expected));
    }
}

/// Adds the faults of one entry of the header of `file`.
fn look_at(file: &str, tensor: &str, entry: &Value, faults: &mut Vec<Finding>) {
    let dtype = &entry["dtype"];
    let known: Option<Dtype> = serde_json::from_value(dtype.clone()).ok();
    let Some(known) = known else {
        let found = format!("{dtype} in {file}");
        let expected = "a dtype of the format, such as F8_E4M3, F32 or BF16";
        faults.push(Finding::new(Fault::UnknownDtype, tensor, found, expected));
        return;
    };
    let numbers = |key: &str| -> Option<Vec<usize>> {
        let numbers = entry[key].as_array()?.iter();
        numbers
            .map(|number| usize::try_from(number.as_u64()?).ok())
            .collect()
    };
    let (shape, offsets) = (numbers("shape"), numbers("data_offsets"));
    let (Some(shape), Some(&[begin, end])) = (shape, offsets.as_deref()) else {
        let found = format!("{entry} in {file}");
        let expected = "a shape and two data_offsets";
        faults.push(Finding::new(Fault::HeaderInvalid, tensor, found, expected));
        return;
    };
    let bits = shape
        .iter()
        .try_fold(known.bitsize(), |bits, size| bits.checked_mul(*size));
    let bytes = bits.map(|bits| bits / 8);
    if bytes != end.checked_sub(begin) {
        let found = format!("data_offsets [{begin}, {end}] in {file}");
        let expected = match bytes {
            Some(bytes) => format!("{bytes} bytes for {known:?} {shape:?}"),
            None => "a shape whose data fits into memory".into(),
        };
        faults.push(Finding::new(Fault::HeaderInvalid, tensor, found, expected));
    }
}
