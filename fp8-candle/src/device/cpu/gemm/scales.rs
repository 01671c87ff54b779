//! The scales of one side of a product.

use super::side::Side;

/// Scales of rows or of columns.
pub(super) enum Scales {
    One(f32),
    Each(Vec<f32>),
}

impl Scales {
    /// Nothing to apply.
    pub(super) const NONE: Self = Self::One(1.);

    /// Those of an operand whose scales are the same along the sum.
    pub(super) fn of(side: &Side<'_>) -> Self {
        match side.dequant_scales {
            &[scale] => Self::One(scale),
            _ => {
                let mut scales = vec![0.; side.kept()];
                if !scales.is_empty() && side.contracted() > 0 {
                    side.scales_into(0, 0, &mut scales);
                }
                Self::Each(scales)
            }
        }
    }
}
