//! The scales of one side of a product.

use super::side::Side;

/// Scales of rows or of columns.
pub(super) enum Scales {
    One(f32),
    Each(Vec<f32>),
}

impl Scales {
    pub(super) fn new(side: &Side<'_>, applied: bool) -> Self {
        match side.dequant_scales {
            _ if applied => Self::One(1.),
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
