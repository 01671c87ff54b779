//! Damaged bytes anywhere: findings, never a panic.

use crate::families::all;
use fp8_files::audit::{AuditOptions, Codes, audit_dir};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_byte_may_be_wrong(family in 0usize..9, at in 0f64..1., byte: u8, in_config: bool) {
        let dir = all()[family].1().write();
        let name = if in_config { "config.json" } else { "model.safetensors" };
        let path = dir.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        // Headers are where damage does most.
        let length = if in_config { bytes.len() } else { bytes.len().min(8000) };
        bytes[(at * length as f64) as usize] = byte;
        std::fs::write(&path, bytes).unwrap();
        audit_dir(dir.path(), &AuditOptions::default().with_codes(Codes::All));
    }
}
