//! What a check has found.

use super::fault::{Fault, Severity};
use crate::load::FamilyName;
use std::collections::BTreeMap;

/// One fault at one place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What kind of fault it is.
    pub fault: Fault,
    /// The tensor by its name in the file; for faults of files, lists and models the file, the entry or the module.
    pub subject: String,
    /// The number or the state that was seen.
    pub found: String,
    /// What it should be.
    pub expected: String,
}

impl Finding {
    pub(super) fn new(
        fault: Fault,
        subject: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self {
            fault,
            subject: subject.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}

/// The result of a check.
///
/// ```
/// use fp8_files::audit::{AuditOptions, audit_dir};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let report = audit_dir(dir.path(), &AuditOptions::default());
/// assert!(report.is_clean(), "{:?}", report.findings);
/// assert_eq!(report.layers, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// The family of files.
    pub family: FamilyName,
    /// Safetensors files that were read.
    pub files: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// FP8 weights whose scale fits.
    pub layers: usize,
    /// Bytes of scales and codes that were read.
    pub bytes_read: u64,
    /// All faults, in the order of [`Fault::ALL`].
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether there is neither an error nor a warning.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Whether there is a fault of at least this severity.
    pub fn has(&self, severity: Severity) -> bool {
        self.count(severity) > 0 || (severity == Severity::Warning && self.has(Severity::Error))
    }

    /// How many kinds of faults there are of this severity.
    pub fn count(&self, severity: Severity) -> usize {
        let groups = self.groups();
        groups
            .keys()
            .filter(|fault| fault.severity() == severity)
            .count()
    }

    /// The findings of each kind of fault.
    pub fn groups(&self) -> BTreeMap<Fault, Vec<&Finding>> {
        let mut groups: BTreeMap<Fault, Vec<&Finding>> = BTreeMap::new();
        for finding in &self.findings {
            groups.entry(finding.fault).or_default().push(finding);
        }
        groups
    }
}
