//! Files, headers, the index.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_files::audit::Fault::*;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const NORM: &str = "model.norm.weight";
const SECOND: &str = SHARDS[1];

fn sharded() -> Model {
    let mut model = channels();
    model.sharded = true;
    model
}

fn edit_index(dir: &Path, edit: impl Fn(&mut serde_json::Map<String, Value>)) {
    let path = dir.join(INDEX);
    let mut index: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(index["weight_map"].as_object_mut().unwrap());
    fs::write(path, index.to_string()).unwrap();
}

/// Changes the header of the only file, as text. The data stay as they are.
fn edit_header(dir: &Path, edit: impl Fn(String) -> String) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = edit(String::from_utf8(header.to_vec()).unwrap());
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), data].concat()).unwrap();
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "no weights",
            channels,
            |m| m.then(|dir| fs::remove_file(dir.join("model.safetensors")).unwrap()),
            NoWeights,
            "",
        ),
        case(
            "a shard is missing",
            sharded,
            |m| m.then(|dir| fs::remove_file(dir.join(SECOND)).unwrap()),
            FileMissing,
            SECOND,
        ),
        case(
            "index and a shard are missing",
            sharded,
            |m| {
                m.then(|dir| {
                    fs::remove_file(dir.join(SECOND)).unwrap();
                    fs::remove_file(dir.join(INDEX)).unwrap();
                })
            },
            FileMissing,
            SECOND,
        )
        .also(&[IndexMissing]),
        case(
            "the index is missing",
            sharded,
            |m| m.then(|dir| fs::remove_file(dir.join(INDEX)).unwrap()),
            IndexMissing,
            INDEX,
        ),
        case(
            "a shard is a folder",
            sharded,
            |m| {
                m.then(|dir| {
                    fs::remove_file(dir.join(SECOND)).unwrap();
                    fs::create_dir(dir.join(SECOND)).unwrap();
                })
            },
            FileUnreadable,
            SECOND,
        ),
        case(
            "a shard is a pointer of git-lfs",
            sharded,
            |m| {
                m.then(|dir| {
            let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4998663696\n";
            fs::write(dir.join(SECOND), pointer).unwrap();
        })
            },
            LfsPointer,
            SECOND,
        ),
        case(
            "a download was interrupted",
            sharded,
            |m| {
                m.then(|dir| {
                    let file = fs::OpenOptions::new()
                        .write(true)
                        .open(dir.join(SECOND))
                        .unwrap();
                    file.set_len(file.metadata().unwrap().len() - 1000).unwrap();
                })
            },
            FileTruncated,
            SECOND,
        ),
        case(
            "a download was interrupted in the header",
            channels,
            |m| {
                m.then(|dir| {
                    fs::OpenOptions::new()
                        .write(true)
                        .open(dir.join("model.safetensors"))
                        .unwrap()
                        .set_len(300)
                        .unwrap();
                })
            },
            FileTruncated,
            "model.safetensors",
        ),
        case(
            "an empty file",
            sharded,
            |m| m.then(|dir| fs::write(dir.join(SECOND), "").unwrap()),
            FileTruncated,
            SECOND,
        ),
        case(
            "bytes at the end",
            channels,
            |m| {
                m.then(|dir| {
                    let path = dir.join("model.safetensors");
                    fs::write(&path, [fs::read(&path).unwrap(), vec![0; 64]].concat()).unwrap();
                })
            },
            FileTooLong,
            "model.safetensors",
        ),
        case(
            "a page of HTML",
            sharded,
            |m| m.then(|dir| fs::write(dir.join(SECOND), "<!DOCTYPE html><html></html>").unwrap()),
            HeaderInvalid,
            SECOND,
        ),
        case(
            "offsets that do not fit the shape",
            channels,
            |m| {
                m.then(|dir| {
                    edit_header(dir, |header| {
                        let at = header.find(NORM).unwrap();
                        let (before, after) = header.split_at(at);
                        format!("{before}{}", after.replacen("[128]", "[127]", 1))
                    })
                })
            },
            HeaderInvalid,
            NORM,
        ),
        case(
            "a shape of 2^200",
            channels,
            |m| {
                m.then(|dir| {
                    edit_header(dir, |header| {
                        let at = header.find(NORM).unwrap();
                        let (before, after) = header.split_at(at);
                        let huge = "[1267650600228229,1267650600228229,1267650600228229]";
                        format!("{before}{}", after.replacen("[128]", huge, 1))
                    })
                })
            },
            HeaderInvalid,
            NORM,
        ),
        case(
            "a name twice",
            channels,
            |m| {
                m.then(|dir| {
                    edit_header(dir, |header| {
                        header.replacen("model.layers.1.input_layernorm.weight", NORM, 1)
                    })
                })
            },
            NameRepeated,
            NORM,
        ),
        case(
            "an unknown dtype",
            channels,
            |m| {
                m.then(|dir| {
                    edit_header(dir, |header| {
                        let at = header.find(NORM).unwrap();
                        let (before, after) = header.split_at(at);
                        format!("{before}{}", after.replacen("BF16", "BF17", 1))
                    })
                })
            },
            UnknownDtype,
            NORM,
        ),
        case(
            "a broken index",
            sharded,
            |m| m.then(|dir| fs::write(dir.join(INDEX), "{\"weight_map\": {").unwrap()),
            IndexInvalid,
            INDEX,
        ),
        case(
            "an index that leads out of the folder",
            sharded,
            |m| {
                m.then(|dir| {
                    edit_index(dir, |map| {
                        map.insert(NORM.into(), json!("../model.safetensors"));
                    })
                })
            },
            IndexInvalid,
            NORM,
        )
        .also(&[TensorNotInIndex]),
        case(
            "a tensor of the index is in no shard",
            sharded,
            |m| {
                m.then(|dir| {
                    edit_index(dir, |map| {
                        map.insert("model.extra.weight".into(), json!(SECOND));
                    })
                })
            },
            IndexTensorMissing,
            "model.extra.weight",
        ),
        case(
            "a tensor is in another shard",
            sharded,
            |m| {
                m.then(|dir| {
                    edit_index(dir, |map| {
                        map.insert(NORM.into(), json!(SHARDS[0]));
                    })
                })
            },
            IndexTensorMissing,
            NORM,
        ),
        case(
            "a tensor is in no index",
            sharded,
            |m| {
                m.then(|dir| {
                    edit_index(dir, |map| {
                        map.remove(NORM);
                    })
                })
            },
            TensorNotInIndex,
            NORM,
        ),
        case(
            "a shard is left over",
            sharded,
            |m| {
                m.then(|dir| {
                    fs::copy(
                        dir.join(SECOND),
                        dir.join("model-00003-of-00003.safetensors"),
                    )
                    .unwrap();
                })
            },
            FileNotInIndex,
            "model-00003-of-00003.safetensors",
        ),
        case(
            "a tensor is in two shards",
            sharded,
            |m| {
                m.then(|dir| {
                    fs::remove_file(dir.join(INDEX)).unwrap();
                    fs::copy(
                        dir.join(SECOND),
                        dir.join("model-00003-of-00003.safetensors"),
                    )
                    .unwrap();
                })
            },
            DuplicateTensor,
            NORM,
        )
        .also(&[IndexMissing]),
    ]
}
