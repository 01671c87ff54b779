//! Whether a model's files are what they say: every fault, not only the first.
//!
//! FP8 files load as finite nonsense without an error if a scale is dropped, inverted or read as another number. [`audit_dir`] reads headers,
//! scales and some codes, and lists all faults that it finds, each with a stable code ([`Fault::code`]), the tensor, the number found, what was
//! expected and what to do. It needs no GPU and little memory, and never fails: whatever cannot be read is a finding too.
//!
//! | part | file |
//! |---|---|
//! | the kinds of faults | `fault.rs` |
//! | files, headers, index | `shards.rs`, `header.rs` |
//! | what the loader refuses | `refused.rs` |
//! | numbers of scales, codes, sizes of weights | `layers.rs`, `scales.rs`, `codes.rs`, `plausible.rs` |
//! | lists and declarations of the configuration | `listed.rs` |
//! | caches and unknown scales | `cache.rs` |
//! | the model as a whole | `model.rs` |
//! | tensors in high precision | `values.rs` |

mod cache;
mod codes;
mod fault;
mod folder;
mod header;
mod layers;
mod listed;
mod model;
mod options;
mod plausible;
mod refused;
mod report;
mod scales;
mod shards;
mod values;

pub use crate::safetensors_file::ReadAt;
pub use fault::{Fault, Severity};
pub use folder::Folder;
pub use options::{AuditOptions, Codes};
pub use report::{Finding, Report};

use crate::load::survey::Survey;
use crate::load::{FamilyName, OpenOptions};
use folder::Local;
use std::collections::BTreeSet;
use std::path::Path;

/// Checks the model in the local folder `path`, or a single safetensors file.
///
/// ```
/// use fp8_files::audit::{AuditOptions, Fault, audit_dir};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let file = dir.path().join("model.safetensors");
/// let bytes = std::fs::read(&file)?;
/// std::fs::write(&file, &bytes[..bytes.len() - 4])?;
/// let report = audit_dir(dir.path(), &AuditOptions::default());
/// assert_eq!(report.findings[0].fault, Fault::FileTruncated);
/// assert_eq!(report.findings[0].subject, "model.safetensors");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn audit_dir(path: impl AsRef<Path>, options: &AuditOptions) -> Report {
    let local = Local::new(path.as_ref());
    audit_files(&local, local.file(), options)
}

/// Checks the model in `folder`, which may be on a server.
pub fn audit(folder: &dyn Folder, options: &AuditOptions) -> Report {
    audit_files(folder, None, options)
}

fn audit_files(folder: &dyn Folder, only: Option<&str>, options: &AuditOptions) -> Report {
    let mut findings = vec![];
    let shards = shards::open(folder, only, &mut findings);
    let files = shards.files.len();
    let opening = OpenOptions::new().with_allow_unscaled(options.allow_unscaled);
    let survey = Survey::of(shards.files, shards.index, folder.directory(), &opening);
    let reads = options.codes != Codes::None;
    let mut bytes_read = 0;
    if files > 0 {
        findings.extend(refused::findings(&survey));
        let (found, bytes) = layers::findings(&survey, options, folder.is_remote());
        bytes_read = bytes;
        findings.extend(found);
        findings.extend(listed::findings(&survey));
        findings.extend(cache::findings(&survey));
        findings.extend(model::findings(&survey, reads));
        if reads {
            findings.extend(values::findings(&survey));
        }
    }
    let has_codes = survey.layers().next().is_some() || !survey.refused.is_empty();
    Report {
        family: match has_codes || survey.has_source() {
            true => survey.family(),
            false => FamilyName::HIGH_PRECISION,
        },
        files,
        tensors: survey.tensors().count(),
        layers: survey.layers().count(),
        bytes_read,
        findings: sorted(findings),
    }
}

/// The findings in the order of their kinds, each once, without those that a missing file explains.
fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    use Fault::*;
    let lost = [
        FileMissing,
        FileUnreadable,
        LfsPointer,
        HeaderInvalid,
        UnknownDtype,
        FileTruncated,
        NameRepeated,
    ];
    let follow = [
        ScaleMissing,
        ScaleWithoutWeight,
        InputScaleMissing,
        LayersMissing,
        LayerIncomplete,
        HeadMissing,
        ConfigWithoutFp8,
        IgnoreMatchesNothing,
        TargetMatchesNothing,
        KvScalesMissing,
        KvScalesPartial,
    ];
    if findings.iter().any(|finding| lost.contains(&finding.fault)) {
        findings.retain(|finding| !follow.contains(&finding.fault));
    }
    let mut seen = BTreeSet::new();
    findings.retain(|finding| seen.insert((finding.fault, finding.subject.clone())));
    findings.sort_by(|a, b| (a.fault, &a.subject).cmp(&(b.fault, &b.subject)));
    findings
}
