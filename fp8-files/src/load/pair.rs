//! One FP8 weight with its scale and the scale of its inputs, compared with the configuration.

use super::catalogue::{Parts, Weight};
use super::experts;
use super::family::{Declared, Family, Global, Order, ScaleLayout};
use super::family_name::FamilyName;
use super::files::{FLOATS, Files, Stored};
use super::options::{Inputs, OpenOptions};
use crate::contents::{Role, role_by_name};
use crate::error::{Error, Result};
use crate::names::{join, split};
use crate::scheme::{InputScheme, LayerScheme, granularity_by_shape, grid, has_shape, shapes_text};
use fp8_core::Granularity;
use safetensors::Dtype;

impl Files {
    /// Puts together and checks the tensors of one weight.
    pub(super) fn weight(&self, name: &str, parts: Parts, options: &OpenOptions) -> Result<Weight> {
        let Parts {
            codes,
            scale,
            global,
            mut input,
        } = parts;
        let family = self.family(&codes);
        let (path, own) = split(name);
        let place = self.path(&codes).display();
        let declared = match own {
            "weight" => (family.layer)(path)?.ok_or_else(|| {
                let found = format!("`{}` in {place} holds FP8 values", codes.name);
                mismatch(path, family, "leaves it in high precision", found)
            })?,
            // Configurations declare linear layers only.
            _ => Default::default(),
        };
        let declared = match &scale {
            Some(scale) if self.scales_a_table(name, family, scale) => {
                Declared::new(Granularity::Tensorwise, InputScheme::None)
            }
            _ => declared,
        };
        if scale.is_none() && !family.is_unscaled {
            return Err(Error::MissingScale {
                tensor: codes.name.clone(),
                missing: self.scale_name(&codes, name),
                path: Some(self.path(&codes).to_path_buf()),
            });
        }
        let fp4 = declared.fp4;
        match (fp4, family.packs_words) {
            (true, _) => self.check_dtype(&codes, &[Dtype::U8, Dtype::I8])?,
            (false, true) => self.check_dtype(&codes, &[Dtype::U32, Dtype::F8_E4M3])?,
            (false, false) => self.check_dtype(&codes, &[Dtype::F8_E4M3])?,
        }
        let shape = self.code_shape(&codes)?;
        let granularity = match &scale {
            None => Granularity::Tensorwise,
            Some(scale) => self.granularity(&codes, shape, scale, &declared)?,
        };
        let global = self.global(&codes, global, fp4 && granularity != Granularity::Mx)?;
        if fp4 && declared.input != Some(InputScheme::Static(())) {
            // For inputs in FP4, which stay in high precision here.
            input = None;
        }
        if let Some(input) = &input {
            self.check_dtype(input, &FLOATS)?;
            if self.shape(input).iter().product::<usize>() != 1 {
                return Err(self.file(input).wrong_shape(&input.name, "one element"));
            }
        }
        let input_scheme = match (declared.input, &input) {
            (Some(InputScheme::Static(())), None) => {
                return Err(Error::MissingTensor {
                    tensor: join(path, family.input_scales[0]),
                    place: match &family.source {
                        Some(config) => {
                            let config = config.display();
                            format!("{place}, though {config} says static inputs,")
                        }
                        None => place.to_string(),
                    },
                });
            }
            (Some(scheme), Some(input))
                if scheme != InputScheme::Static(()) && !family.may_ignore_input_scales =>
            {
                let says = "gives its inputs no static scale";
                let place = self.path(input).display();
                let found = format!("there is `{}` in {place}", input.name);
                return Err(mismatch(path, family, says, found));
            }
            (Some(scheme), _) => scheme,
            (None, Some(_)) => InputScheme::Static(()),
            (None, None) if scale.is_none() => InputScheme::None,
            (None, None) => InputScheme::per_token(),
        };
        let input_scheme = match options.inputs {
            Inputs::AsStored => input_scheme,
            Inputs::WeightOnly => InputScheme::None,
            Inputs::Groups(size) => InputScheme::per_group(size.max(1))
                .with_power_of_two(input_scheme.has_power_of_two_scales()),
        };
        Ok(Weight {
            codes,
            shape,
            scale,
            global,
            layout: declared.layout,
            fp4,
            input,
            scheme: LayerScheme {
                weight: granularity,
                input: input_scheme,
            },
        })
    }

    /// Whether a scale is the only one of a table of embeddings. transformers stores such tables (`FP8Embedding`) beside layers in blocks, and
    /// the configuration declares the blocks only. A table is looked up, so it has no inputs to scale.
    fn scales_a_table(&self, name: &str, family: &Family, scale: &Stored) -> bool {
        let is_table = matches!(role_by_name(name), Some((_, Role::Embedding)));
        let is_one = self.shape(scale).iter().product::<usize>() == 1;
        is_table && is_one && family.name == FamilyName::FP8_BLOCKS
    }

    /// The family's name for the scale of a weight.
    fn scale_name(&self, codes: &Stored, name: &str) -> String {
        if split(name).1 != "weight" {
            return format!("{name}_scale");
        }
        let own = self.family(codes).weight_scales[0];
        match split(&codes.name) {
            (path, "weight") => join(path, own),
            _ => format!("the {own} of {name}"),
        }
    }

    /// `[N, K]` of a weight.
    fn code_shape(&self, codes: &Stored) -> Result<[usize; 2]> {
        let wrong = |expected: &str| self.file(codes).wrong_shape(&codes.name, expected);
        let &[n, k] = self.shape(codes) else {
            return Err(wrong("two dimensions for an FP8 weight"));
        };
        let in_one = match self.dtype(codes) {
            Some(Dtype::U32) => 4,
            Some(Dtype::U8 | Dtype::I8) => 2,
            _ => 1,
        };
        let k = k.saturating_mul(in_one);
        if let Order::Rotary { heads } = codes.order
            && (heads == 0 || !n.is_multiple_of(heads.saturating_mul(2)))
        {
            return Err(wrong(&format!("rows in pairs for {heads} heads")));
        }
        Ok([n, k])
    }

    /// Which elements of an FP8 weight share a scale. Fails if the scale's shape or dtype does not fit.
    fn granularity(
        &self,
        codes: &Stored,
        [n, k]: [usize; 2],
        scale: &Stored,
        declared: &Declared,
    ) -> Result<Granularity> {
        let Declared {
            weight: declared,
            layout,
            fp4,
            ..
        } = *declared;
        let dims = self.shape(scale);
        let bytes = matches!(self.dtype(scale), Some(Dtype::U8 | Dtype::F8_E8M0));
        let wrong_shape = || {
            let shapes = format!("{} `{}`", shapes_text(declared, n, k), codes.name);
            self.file(scale).wrong_shape(&scale.name, shapes)
        };
        let granularity = match declared {
            Some(declared) => declared,
            // Bytes along rows of 32 are OCP microscaling.
            None if bytes && has_shape(dims, Granularity::Mx, n, k) => Granularity::Mx,
            None => {
                let found = granularity_by_shape(dims, n, k);
                // A configuration has to declare the size of blocks.
                let is_clear = |found: &Granularity| {
                    self.family(codes).source.is_none()
                        || !matches!(found, Granularity::Blockwise { .. })
                };
                found.filter(is_clear).ok_or_else(wrong_shape)?
            }
        };
        let fits = match layout {
            ScaleLayout::RowMajor => {
                has_shape(dims, granularity, n, k) || is_padded(dims, granularity, n, k)
            }
            ScaleLayout::Tiles => {
                let grid = grid(granularity, n, k);
                let (rows, cols) = (grid.scale_rows(), grid.scale_cols());
                dims == [rows.next_multiple_of(128), cols.next_multiple_of(4)]
            }
        };
        if !fits {
            return Err(wrong_shape());
        }
        let [f32, bf16, f16] = FLOATS;
        let allowed: &[Dtype] = match granularity {
            Granularity::Blockwise { .. } if fp4 => &[Dtype::F8_E4M3],
            Granularity::Mx => &[Dtype::U8, Dtype::F8_E8M0],
            Granularity::Blockwise { .. } => &[f32, bf16, f16, Dtype::F8_E8M0, Dtype::U8],
            _ => &[f32, bf16, f16, Dtype::F8_E8M0],
        };
        self.check_dtype(scale, allowed)?;
        if let Granularity::Blockwise { rows, cols } = granularity {
            self.check_heads(codes, n, (rows, cols), scale)?;
            self.check_halves(codes, n, rows, scale)?;
        }
        Ok(granularity)
    }

    /// Checks the number that all scales of a weight have in common: every weight in NVFP4 has one, and no other.
    fn global(
        &self,
        codes: &Stored,
        global: Option<Stored>,
        is_needed: bool,
    ) -> Result<Option<(Stored, Global)>> {
        let family = self.family(codes);
        let Some(stored) = global else {
            let Some((own, _)) = family.global_scales.first().filter(|_| is_needed) else {
                return Ok(None);
            };
            return Err(Error::MissingScale {
                tensor: codes.name.clone(),
                missing: join(split(&codes.name).0, own),
                path: Some(self.path(codes).to_path_buf()),
            });
        };
        if !is_needed {
            let path = split(&codes.name).0;
            let found = format!(
                "there is `{}` in {}",
                stored.name,
                self.path(&stored).display()
            );
            return Err(mismatch(path, family, "does not store it in NVFP4", found));
        }
        self.check_dtype(&stored, &FLOATS)?;
        if self.shape(&stored).iter().product::<usize>() != 1 {
            return Err(self.file(&stored).wrong_shape(&stored.name, "one element"));
        }
        let global = family.global(split(&stored.name).1);
        Ok(global.map(|global| (stored, global)))
    }

    /// Checks that no block of `rows` rows spans an expert's gate and its other projection.
    fn check_halves(&self, codes: &Stored, n: usize, rows: usize, scale: &Stored) -> Result<()> {
        let file = self.file(scale);
        let Some((whole, dims)) = file.whole(&scale.name) else {
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

    /// Checks that blocks of several rows hold whole heads. The rows of a head change places among each other, so with other blocks the
    /// rows of one scale would be spread over the model's weight.
    fn check_heads(
        &self,
        codes: &Stored,
        n: usize,
        (rows, cols): (usize, usize),
        scale: &Stored,
    ) -> Result<()> {
        let Order::Rotary { heads } = codes.order else {
            return Ok(());
        };
        let head = n.checked_div(heads).unwrap_or_default();
        if rows == 1 || rows >= n || (head > 0 && rows.is_multiple_of(head)) {
            return Ok(());
        }
        let expected = format!(
            "blocks of one row or of whole heads of {head} rows, since the rows of `{}` take another order, \
             not blocks of {rows}x{cols}",
            codes.name
        );
        Err(self.file(scale).wrong_shape(&scale.name, expected))
    }
}

/// Whether a grid of block scales is padded to a multiple of a tile, as some writers do.
fn is_padded(dims: &[usize], granularity: Granularity, n: usize, k: usize) -> bool {
    let (Granularity::Blockwise { .. }, &[r, c]) = (granularity, dims) else {
        return false;
    };
    let grid = grid(granularity, n, k);
    let (rows, cols) = (grid.scale_rows(), grid.scale_cols());
    let padded = |got: usize, needed: usize| {
        [1, 2, 4, 8, 16, 128]
            .iter()
            .any(|tile| got == needed.next_multiple_of(*tile))
    };
    rows > 0 && cols > 0 && padded(r, rows) && padded(c, cols)
}

fn mismatch(path: &str, family: &Family, says: &str, found: String) -> Error {
    Error::SchemeMismatch {
        layer: path.to_string(),
        path: family.source.clone().unwrap_or_default(),
        says: says.to_string(),
        found,
    }
}
