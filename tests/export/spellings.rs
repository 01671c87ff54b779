//! A calibrated model written with the names and configurations of other families.

use crate::net::*;
use candle_core::Device;
use fp8::load::Checkpoint;
use fp8::rewrite::Spelling;
use fp8::{Error, ExportOptions, FilesError, save_calibrated, save_calibrated_with};
use fp8_test_support::{assert_same, delayed};

#[test]
fn a_static_recipe_is_written_as_every_family_that_can_say_it() {
    let (_vars, net) = calibrated(delayed(16));
    let usual = dir();
    save_calibrated(&net, usual.path()).unwrap();
    let usual = Checkpoint::open_dir(usual.path()).unwrap();
    for spelling in [Spelling::AutoFp8, Spelling::ModelOpt] {
        let dir = dir();
        let options = ExportOptions::new().with_spelling(spelling);
        save_calibrated_with(&net, dir.path(), &options).unwrap();
        let other = Checkpoint::open_dir(dir.path()).unwrap();
        assert_eq!(other.layer_paths(), usual.layer_paths(), "{spelling}");
        assert_ne!(other.family(), usual.family());
        for path in other.layer_paths() {
            let layer = |checkpoint: &Checkpoint| {
                let layer = checkpoint.stored_layer(&path, &Device::Cpu).unwrap();
                (layer.codes, format!("{:?}", layer.input))
            };
            let ((a, a_input), (b, b_input)) = (layer(&other), layer(&usual));
            assert_same(&path, a.codes(), b.codes());
            assert_same(&path, a.dequant_scale(), b.dequant_scale());
            assert_eq!(a_input, b_input, "{path}");
        }
        let second = dir.path().join("hf_quant_config.json").exists();
        assert_eq!(second, spelling == Spelling::ModelOpt);
    }
    let dir = dir();
    let options = ExportOptions::new().with_spelling(Spelling::Fp8Blocks);
    let error = save_calibrated_with(&net, dir.path(), &options).unwrap_err();
    assert!(
        matches!(error, Error::Files(FilesError::Inexpressible { .. })),
        "{error}"
    );
    assert!(names_in(dir.path()).is_empty());
}
