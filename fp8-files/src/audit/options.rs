//! How much of the weights a check reads.

/// Which codes a check reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codes {
    /// None: headers and scales only.
    None,
    /// Some rows of every weight, a few tens of KiB.
    #[default]
    Samples,
    /// All.
    All,
}

/// Options of [`audit`](super::audit()).
///
/// ```
/// use fp8_files::audit::{AuditOptions, Codes};
/// let options = AuditOptions::default().with_codes(Codes::All);
/// assert_eq!(options.codes, Codes::All);
/// assert!(!options.allow_unscaled);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditOptions {
    /// See [`AuditOptions::with_codes`].
    pub codes: Codes,
    /// See [`AuditOptions::with_allow_unscaled`].
    pub allow_unscaled: bool,
}

impl AuditOptions {
    /// Sets which codes are read. Clipped, unused and NaN codes are found in those only; scales are judged by the weights that they make,
    /// and without codes by the largest that they could make.
    pub fn with_codes(mut self, codes: Codes) -> Self {
        self.codes = codes;
        self
    }

    /// Sets whether files of plain casts, in which no tensor is a scale, are sound.
    pub fn with_allow_unscaled(mut self, allow: bool) -> Self {
        self.allow_unscaled = allow;
        self
    }
}
