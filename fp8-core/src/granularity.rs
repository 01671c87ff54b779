//! Which scale belongs to which element of a matrix.

use std::{fmt, num::NonZeroUsize, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{GridError, ParseNameError};

/// Elements of one block of the OCP microscaling (MX) formats.
pub const MX_BLOCK: usize = 32;

/// How many elements share a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Granularity {
    /// One scale for the whole tensor.
    #[default]
    Tensorwise,
    /// One scale for each kept index of a GEMM operand, along its contraction axis: torchao's `axiswise`.
    #[serde(alias = "axiswise")]
    Rowwise,
    /// One scale for each block: 128x128 for the weights and 1x128 for the inputs of DeepSeek-V3.
    Blockwise {
        /// Kept indices in one block.
        #[serde(deserialize_with = "non_zero")]
        rows: usize,
        /// Contracted indices in one block.
        #[serde(deserialize_with = "non_zero")]
        cols: usize,
    },
    /// One E8M0 scale for 32 elements along the contraction axis (OCP Microscaling Formats).
    Mx,
}

/// The dimension of a matrix that a GEMM sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contraction {
    /// The sum runs along each row: one scale per row.
    Cols,
    /// The sum runs down each column: one scale per column.
    Rows,
}

fn non_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    NonZeroUsize::deserialize(deserializer).map(NonZeroUsize::get)
}

impl Granularity {
    /// The scales of a `rows x cols` matrix that a GEMM sums over `contraction`.
    ///
    /// The sizes of [`Granularity::Blockwise`] and [`Granularity::Mx`] follow the contraction, as a transposed view
    /// of the matrix would: 1x128 is 128x1 where the sum runs down the columns. A block size of 0 counts as 1; it can
    /// only come from code, not from a file.
    pub fn grid(self, rows: usize, cols: usize, contraction: Contraction) -> ScaleGrid {
        let (kept, contracted) = match self {
            Self::Tensorwise => return ScaleGrid::tensorwise(rows, cols),
            Self::Rowwise => {
                return match contraction {
                    Contraction::Cols => ScaleGrid::per_row(rows, cols),
                    Contraction::Rows => ScaleGrid::per_col(rows, cols),
                };
            }
            Self::Blockwise { rows, cols } => (rows.max(1), cols.max(1)),
            Self::Mx => (1, MX_BLOCK),
        };
        match contraction {
            Contraction::Cols => ScaleGrid::blocks(rows, cols, kept, contracted),
            Contraction::Rows => ScaleGrid::blocks(rows, cols, contracted, kept),
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensorwise => f.pad("tensorwise"),
            Self::Rowwise => f.pad("rowwise"),
            Self::Blockwise { rows, cols } => write!(f, "blockwise:{rows}x{cols}"),
            Self::Mx => f.pad("mx"),
        }
    }
}

impl FromStr for Granularity {
    type Err = ParseNameError;

    /// Accepts what `Display` writes, and `axiswise`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let blockwise = |sizes: &str| {
            let (rows, cols) = sizes.split_once('x')?;
            let size = |text: &str| text.parse::<NonZeroUsize>().ok().map(NonZeroUsize::get);
            Some(Self::Blockwise {
                rows: size(rows)?,
                cols: size(cols)?,
            })
        };
        match name {
            "tensorwise" => Some(Self::Tensorwise),
            "rowwise" | "axiswise" => Some(Self::Rowwise),
            "mx" => Some(Self::Mx),
            _ => name.strip_prefix("blockwise:").and_then(blockwise),
        }
        .ok_or_else(|| ParseNameError {
            what: "granularity",
            name: name.to_owned(),
            expected: "tensorwise, rowwise (axiswise), blockwise:<rows>x<cols> or mx",
        })
    }
}

/// How the scales of a row-major matrix are laid out: a row-major `[scale_rows, scale_cols]` matrix, one entry per block.
///
/// Blocks at the lower and right edge may be partial. A dimension that one scale covers has that scale even where it is
/// empty, so that the shapes `[1]`, `[rows, 1]` and `[1, cols]` hold for every matrix.
///
/// ```
/// use fp8_core::{Contraction, Granularity, ScaleGrid};
///
/// let blocks = ScaleGrid::new(256, 300, 128, 128)?;
/// assert_eq!((blocks.scale_rows(), blocks.scale_cols()), (2, 3));
/// assert_eq!(blocks.index(130, 299), 5); // the last block
///
/// // One scale per row, for a GEMM that sums along the rows.
/// let rowwise = Granularity::Rowwise.grid(256, 300, Contraction::Cols);
/// assert_eq!(rowwise, ScaleGrid::per_row(256, 300));
/// # Ok::<(), fp8_core::GridError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaleGrid {
    rows: usize,
    cols: usize,
    block_rows: usize,
    block_cols: usize,
    scale_rows: usize,
    scale_cols: usize,
}

impl ScaleGrid {
    /// A `rows x cols` matrix with one scale for each `block_rows x block_cols` block.
    ///
    /// # Errors
    /// If a block has no elements, or the matrix more elements than a `usize` can count.
    pub fn new(
        rows: usize,
        cols: usize,
        block_rows: usize,
        block_cols: usize,
    ) -> Result<Self, GridError> {
        if block_rows == 0 || block_cols == 0 {
            return Err(GridError::EmptyBlock {
                block_rows,
                block_cols,
            });
        }
        if rows.checked_mul(cols).is_none() {
            return Err(GridError::TooLarge { rows, cols });
        }
        Ok(Self::blocks(rows, cols, block_rows, block_cols))
    }

    /// One scale for everything.
    pub fn tensorwise(rows: usize, cols: usize) -> Self {
        Self {
            scale_rows: 1,
            scale_cols: 1,
            ..Self::blocks(rows, cols, rows.max(1), cols.max(1))
        }
    }

    /// One scale for each row: `[rows, 1]`.
    pub fn per_row(rows: usize, cols: usize) -> Self {
        Self {
            scale_cols: 1,
            ..Self::blocks(rows, cols, 1, cols.max(1))
        }
    }

    /// One scale for each column: `[1, cols]`.
    pub fn per_col(rows: usize, cols: usize) -> Self {
        Self::per_row(cols, rows).transpose()
    }

    fn blocks(rows: usize, cols: usize, block_rows: usize, block_cols: usize) -> Self {
        let (scale_rows, scale_cols) = (rows.div_ceil(block_rows), cols.div_ceil(block_cols));
        Self {
            rows,
            cols,
            block_rows,
            block_cols,
            scale_rows,
            scale_cols,
        }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows of a whole block.
    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Columns of a whole block.
    pub fn block_cols(&self) -> usize {
        self.block_cols
    }

    /// Rows of the matrix of scales.
    pub fn scale_rows(&self) -> usize {
        self.scale_rows
    }

    /// Columns of the matrix of scales.
    pub fn scale_cols(&self) -> usize {
        self.scale_cols
    }

    /// The number of scales.
    #[allow(
        clippy::len_without_is_empty,
        reason = "a count of scales; emptiness says nothing of use"
    )]
    pub fn len(&self) -> usize {
        self.scale_rows * self.scale_cols
    }

    /// The index of the scale of the element at `(row, col)`, into the row-major matrix of scales.
    pub fn index(&self, row: usize, col: usize) -> usize {
        row / self.block_rows * self.scale_cols + col / self.block_cols
    }

    /// The grid of a matrix of `rows` rows with the same columns and blocks.
    ///
    /// ```
    /// use fp8_core::ScaleGrid;
    ///
    /// let groups = ScaleGrid::new(100, 300, 1, 128)?;
    /// assert_eq!(groups.of_rows(7), ScaleGrid::new(7, 300, 1, 128)?);
    /// # Ok::<(), fp8_core::GridError>(())
    /// ```
    pub fn of_rows(&self, rows: usize) -> Self {
        Self {
            rows,
            scale_rows: rows.div_ceil(self.block_rows),
            ..*self
        }
    }

    /// The grid of the transposed matrix.
    pub fn transpose(&self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            block_rows: self.block_cols,
            block_cols: self.block_rows,
            scale_rows: self.scale_cols,
            scale_cols: self.scale_rows,
        }
    }
}
