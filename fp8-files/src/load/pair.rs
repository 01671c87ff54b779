//! One FP8 weight with its scale and that of its inputs, held against the configuration.

use super::catalogue::{FLOATS, FLOATS_TEXT, Source, Stored, Weight};
use super::experts;
use super::family::{Family, Order, ScaleLayout};
use super::options::{Inputs, OpenOptions};
use crate::error::{Error, Result};
use crate::names::{join, split};
use crate::scheme::{InputScheme, LayerScheme, granularity_by_shape, grid, has_shape, shapes_text};
use fp8_core::Granularity;
use safetensors::Dtype;
use std::path::{Path, PathBuf};

impl Source<'_> {
    /// Brings together what belongs to one weight.
    pub(super) fn weight(
        &self,
        name: &str,
        codes: Stored,
        scale: Option<Stored>,
        input: Option<Stored>,
        options: &OpenOptions,
    ) -> Result<Weight> {
        let family = self.family(&codes);
        let (path, own) = split(name);
        let scheme = match own {
            "weight" => family.layer(path)?.ok_or_else(|| {
                let found = format!(
                    "`{}` in {} holds FP8 values",
                    codes.name,
                    self.path(&codes).display()
                );
                mismatch(path, family, "leaves it in high precision", found)
            })?,
            // Not a linear layer's, so no configuration speaks of it.
            _ => LayerScheme::default(),
        };
        if scale.is_none() && !family.is_unscaled() {
            return Err(Error::MissingScale {
                tensor: codes.name.clone(),
                missing: self.scale_name(&codes, name),
                path: Some(self.path(&codes).to_path_buf()),
            });
        }
        match family.packs_words() {
            true => {
                self.check_dtype(&codes, &[Dtype::U32, Dtype::F8_E4M3], "U32 or F8_E4M3")?;
            }
            false => self.check_dtype(&codes, &[Dtype::F8_E4M3], "F8_E4M3")?,
        }
        let shape = self.code_shape(&codes)?;
        let granularity = match &scale {
            None => Granularity::Tensorwise,
            Some(scale) => self.granularity(&codes, &shape, scale, scheme.weight, path)?,
        };
        if let Some(input) = &input {
            self.check_dtype(input, &FLOATS, FLOATS_TEXT)?;
            let shape = self.shape(input);
            if shape.iter().product::<usize>() != 1 {
                return Err(Error::TensorShape {
                    tensor: input.name.clone(),
                    got: shape.to_vec(),
                    expected: format!("one element, in {}", self.path(input).display()),
                });
            }
        }
        let input_scheme = match (scheme.input, &input) {
            (Some(InputScheme::Static), None) => {
                let config = family.source().map(|path| path.display().to_string());
                let files = self.path(&codes).display();
                return Err(Error::MissingTensor {
                    tensor: join(path, family.input_scale_names()[0]),
                    place: match config {
                        Some(config) => format!("{files}, though {config} says static inputs,"),
                        None => files.to_string(),
                    },
                });
            }
            (Some(scheme), Some(input))
                if scheme != InputScheme::Static && !family.may_ignore_input_scales() =>
            {
                let says = "gives its inputs no static scale";
                let found = format!(
                    "there is `{}` in {}",
                    input.name,
                    self.path(input).display()
                );
                return Err(mismatch(path, family, says, found));
            }
            (Some(scheme), _) => scheme,
            (None, Some(_)) => InputScheme::Static,
            (None, None) if scale.is_none() => InputScheme::None,
            (None, None) => InputScheme::PerToken,
        };
        let input_scheme = match options.inputs {
            Inputs::AsStored => input_scheme,
            Inputs::WeightOnly => InputScheme::None,
            Inputs::Groups(size) => InputScheme::PerGroup(size.max(1)),
        };
        Ok(Weight {
            layout: family.scale_layout(path),
            codes,
            shape,
            scale,
            input,
            granularity,
            input_scheme,
            power_of_two_inputs: scheme.power_of_two_inputs,
            amax_bound: scheme.amax_bound,
        })
    }

    /// The name under which a family would keep the scale of a weight.
    fn scale_name(&self, codes: &Stored, name: &str) -> String {
        match split(name) {
            (_, "weight") => {
                let own = self.family(codes).weight_scale_names()[0];
                let (path, stored) = split(&codes.name);
                match stored {
                    "weight" => join(path, own),
                    _ => format!("the {own} of {name}"),
                }
            }
            _ => format!("{name}_scale"),
        }
    }

    /// `[N, K]` of a weight.
    fn code_shape(&self, codes: &Stored) -> Result<Vec<usize>> {
        let shape = self.shape(codes);
        let &[n, k] = shape else {
            return Err(Error::TensorShape {
                tensor: codes.name.clone(),
                got: shape.to_vec(),
                expected: format!(
                    "two dimensions for an FP8 weight, in {}",
                    self.path(codes).display()
                ),
            });
        };
        let words = self.dtype(codes) == Some(Dtype::U32);
        let k = if words { k.saturating_mul(4) } else { k };
        if let Order::Rotary { heads } = codes.order
            && (heads == 0 || !n.is_multiple_of(heads.saturating_mul(2)))
        {
            return Err(Error::TensorShape {
                tensor: codes.name.clone(),
                got: shape.to_vec(),
                expected: format!(
                    "rows in pairs for {heads} heads, in {}",
                    self.path(codes).display()
                ),
            });
        }
        Ok(vec![n, k])
    }

    /// Which elements of an FP8 weight share a scale, held against shape and dtype in the file.
    fn granularity(
        &self,
        codes: &Stored,
        shape: &[usize],
        scale: &Stored,
        told: Option<Granularity>,
        path: &str,
    ) -> Result<Granularity> {
        let (n, k) = (shape[0], shape[1]);
        let dims = self.shape(scale);
        let bytes = matches!(self.dtype(scale), Some(Dtype::U8 | Dtype::F8_E8M0));
        let wrong_shape = || Error::TensorShape {
            tensor: scale.name.clone(),
            got: dims.to_vec(),
            expected: format!(
                "{} `{}`, in {}",
                shapes_text(told, n, k),
                codes.name,
                self.path(scale).display()
            ),
        };
        let granularity = match told {
            Some(told) => told,
            // Bytes along rows of 32 are the microscaling of OCP.
            None if bytes && has_shape(dims, Granularity::Mx, n, k) => Granularity::Mx,
            None => {
                let found = granularity_by_shape(dims, n, k);
                // Where there are blocks a configuration tells their size.
                let is_told = |found: &Granularity| {
                    self.family(codes).source().is_none()
                        || !matches!(found, Granularity::Blockwise { .. })
                };
                found.filter(is_told).ok_or_else(wrong_shape)?
            }
        };
        let fits = match self.family(codes).scale_layout(path) {
            ScaleLayout::RowMajor => {
                has_shape(dims, granularity, n, k) || is_padded(dims, granularity, n, k)
            }
            ScaleLayout::Tiles => {
                let (rows, cols) = grid(granularity, n, k);
                dims == [rows.next_multiple_of(128), cols.next_multiple_of(4)]
            }
        };
        if !fits {
            return Err(wrong_shape());
        }
        let (allowed, text): (&[Dtype], _) = match granularity {
            Granularity::Mx => (&[Dtype::U8, Dtype::F8_E8M0], "U8 or F8_E8M0"),
            Granularity::Blockwise { .. } => (
                &[
                    Dtype::F32,
                    Dtype::BF16,
                    Dtype::F16,
                    Dtype::F8_E8M0,
                    Dtype::U8,
                ],
                "F32, BF16, F16, F8_E8M0 or U8",
            ),
            _ => (
                &[Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0],
                "F32, BF16, F16 or F8_E8M0",
            ),
        };
        self.check_dtype(scale, allowed, text)?;
        self.check_heads(codes, n, granularity, scale)?;
        self.check_halves(codes, n, granularity, scale)?;
        Ok(granularity)
    }

    /// A block that holds rows of an expert's gate and of its other projection belongs to neither.
    fn check_halves(
        &self,
        codes: &Stored,
        n: usize,
        granularity: Granularity,
        scale: &Stored,
    ) -> Result<()> {
        let file = self.file(scale);
        let (Granularity::Blockwise { rows, .. }, Some((whole, dims))) =
            (granularity, file.whole(&scale.name))
        else {
            return Ok(());
        };
        let both = n.saturating_mul(2);
        let is_cut_between_blocks = both <= rows || n.is_multiple_of(rows);
        if !experts::is_halved(whole)
            || is_cut_between_blocks && dims.get(1) == Some(&both.div_ceil(rows))
        {
            return Ok(());
        }
        Err(Error::TensorShape {
            tensor: whole.to_string(),
            got: dims.to_vec(),
            expected: format!(
                "blocks of {rows} rows that end where the {n} rows of `{}` end, in {}",
                codes.name,
                file.path().display()
            ),
        })
    }

    /// The rows of a head change places among each other, so a block of several rows has to hold whole heads: otherwise its
    /// scale would be needed by rows that no block of the model holds together.
    fn check_heads(
        &self,
        codes: &Stored,
        n: usize,
        granularity: Granularity,
        scale: &Stored,
    ) -> Result<()> {
        let (Order::Rotary { heads }, Granularity::Blockwise { rows, cols }) =
            (codes.order, granularity)
        else {
            return Ok(());
        };
        let head = n.checked_div(heads).unwrap_or_default();
        if rows == 1 || rows >= n || (head > 0 && rows.is_multiple_of(head)) {
            return Ok(());
        }
        Err(Error::TensorShape {
            tensor: scale.name.clone(),
            got: self.shape(scale).to_vec(),
            expected: format!(
                "blocks of one row or of whole heads of {head} rows, since the rows of `{}` take another order, \
                 not blocks of {rows}x{cols}, in {}",
                codes.name,
                self.path(scale).display()
            ),
        })
    }
}

/// Whether a grid of block scales goes beyond the weight by less than a tile of four: some writers pad it.
pub(super) fn is_padded(dims: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
    let (Granularity::Blockwise { .. }, &[r, c]) = (granularity, dims) else {
        return false;
    };
    let (rows, cols) = grid(granularity, n, k);
    let padded = |got: usize, needed: usize| {
        [1, 2, 4, 8, 16, 128]
            .iter()
            .any(|tile| got == needed.next_multiple_of(*tile))
    };
    rows > 0 && cols > 0 && padded(r, rows) && padded(c, cols)
}

fn mismatch(path: &str, family: &dyn Family, says: &str, found: String) -> Error {
    Error::SchemeMismatch {
        layer: path.to_string(),
        path: family.source().map_or_else(PathBuf::new, Path::to_path_buf),
        says: says.to_string(),
        found,
    }
}
