//! Several layers at once, and large tensors in parts: the same bytes.

use crate::helpers::*;
use candle_core::DType;
use fp8_files::rewrite::{
    self, QuantizeOptions, Scheme, Source, Spelling, WriteOptions, WriteReport,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders with weights in FP4.
fn fp4_folders() -> Vec<PathBuf> {
    folders_in(&golden("../fp4"))
}

fn folders_in(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    assert!(folders.len() > 5, "{}", parent.display());
    folders.sort();
    folders
}

/// Threads, and memory: enough for whole tensors, and too little for more than some rows.
const WAYS: [(usize, u64); 6] = [
    (1, 1 << 30),
    (2, 1 << 30),
    (7, 1 << 30),
    (1, 64 * 1000),
    (3, 64 * 1000),
    (3, 0),
];

/// The content of every file of the directory that `write` makes, the same in all ways.
fn same(case: &str, write: &dyn Fn(&Path, &WriteOptions) -> fp8_files::Result<WriteReport>) {
    let mut first: Option<(WriteReport, BTreeMap<String, Vec<u8>>)> = None;
    for (threads, memory) in WAYS {
        let dir = dir();
        let to = dir.path().join("out");
        let options = WriteOptions::new().with_shard_bytes(40_000);
        let options = options.with_threads(threads).with_memory(memory);
        let mut report = write(&to, &options).unwrap_or_else(|e| panic!("{case}: {e}"));
        report.directory = Default::default();
        let content = |name: &String| (name.clone(), fs::read(to.join(name)).unwrap());
        let files = names_in(&to).iter().map(content).collect();
        match &first {
            None => first = Some((report, files)),
            Some((told, before)) => {
                assert_eq!(&report, told, "{case}, {threads} threads");
                assert!(before.len() > 1 && before.keys().eq(files.keys()), "{case}");
                for (name, bytes) in before {
                    assert!(
                        bytes == &files[name],
                        "{case}, {threads} threads, {memory} bytes: {name}"
                    );
                }
            }
        }
    }
}

#[test]
fn quantized_files_are_the_same() {
    let dir = dir();
    plain_model(dir.path(), (128, 256), false, DType::BF16);
    let source = open(dir.path());
    for scheme in [
        "channel-token",
        "block128",
        "mxfp8",
        "dynamic-tensor",
        "tensor-token",
        "weight-only:blockwise:48x32",
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        same(&scheme.to_string(), &|to, write| {
            let options = QuantizeOptions::new(scheme).with_write(write.clone());
            rewrite::quantize(&source, to, &options, &mut rewrite::quiet)
        });
    }
}

#[test]
fn converted_and_dequantized_files_are_the_same() {
    for family in [
        "ct_block128",
        "ct_channel_token_bf16",
        "modelopt_pb_wo",
        "hf_block_f32",
        "mixtral_hf5_fused",
        "torchao_tensor",
        "modelopt_fp8_kv",
    ] {
        let source = open_golden(family);
        same(family, &|to, write| {
            rewrite::dequantize(&source, to, DType::F32, write, &mut rewrite::quiet)
        });
        same(family, &|to, write| {
            let spelling = Spelling::CompressedTensors;
            rewrite::convert(&source, to, spelling, write, &mut rewrite::quiet)
        });
    }
    // FP4, with two codes in a byte, and experts whose rows alternate in one tensor.
    for folder in fp4_folders() {
        same(&folder.display().to_string(), &|to, write| {
            rewrite::dequantize(&open(&folder), to, DType::F32, write, &mut rewrite::quiet)
        });
        same(&folder.display().to_string(), &|to, write| {
            let options = QuantizeOptions::new(Scheme::Mxfp8).with_write(write.clone());
            rewrite::quantize(&open(&folder), to, &options, &mut rewrite::quiet)
        });
    }
}

/// Rows begin and end anywhere, also within blocks.
#[test]
fn rows_are_those_of_the_value() {
    let folders = [folders_in(&golden(".")), fp4_folders()].concat();
    for folder in folders {
        let source = open(&folder);
        for name in Source::names(&source) {
            let whole = Source::value(&source, &name, DType::F32).unwrap();
            let Some(&rows) = whole.dims().first() else {
                continue;
            };
            for (first, end) in [
                (0, rows),
                (0, 1),
                (rows / 3, rows / 2 + 1),
                (rows - 1, rows),
            ] {
                let part = source.rows(&name, first..end, DType::F32).unwrap();
                let Some(part) = part else {
                    assert!(name.ends_with("_scale"), "{} {name}", folder.display());
                    continue;
                };
                let expected = whole.narrow(0, first, end - first).unwrap();
                assert_eq!(part.dims(), expected.dims());
                assert_eq!(
                    bits(&part),
                    bits(&expected),
                    "{} {name} {first}..{end}",
                    folder.display()
                );
            }
        }
    }
}

#[test]
fn progress_is_told_in_order() {
    let dir = dir();
    let (plain, to) = (dir.path().join("plain"), dir.path().join("out"));
    plain_model(&plain, (64, 96), false, DType::F32);
    let source = open(&plain);
    let mut told: Vec<Vec<(String, u64)>> = vec![];
    for threads in [1, 4] {
        let write = WriteOptions::new()
            .with_threads(threads)
            .with_overwrite(true);
        let options = QuantizeOptions::new(Scheme::ChannelToken).with_write(write);
        let mut lines = vec![];
        let mut tell = |progress: rewrite::Progress<'_>| {
            lines.push((progress.name.to_string(), progress.done));
            std::ops::ControlFlow::Continue(())
        };
        let report = rewrite::quantize(&source, &to, &options, &mut tell).unwrap();
        assert_eq!(lines.last(), Some(&(String::new(), report.bytes)));
        told.push(lines);
    }
    assert_eq!(told[0], told[1]);
}
