//! The files of the model, compared with each other and with the index.

use super::fault::Fault;
use super::folder::Folder;
use super::header;
use super::report::Finding;
use crate::load::directory::{MAX_INDEX, in_order};
use crate::read::read_text;
use crate::safetensors_file::SafetensorsFile;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The files that could be opened, and the file of each tensor.
#[derive(Default)]
pub(super) struct Shards {
    pub(super) files: Vec<SafetensorsFile>,
    pub(super) index: HashMap<String, usize>,
}

/// Opens the files of the model; `only` names the single file to read.
pub(super) fn open(folder: &dyn Folder, only: Option<&str>, faults: &mut Vec<Finding>) -> Shards {
    let names = match only {
        Some(name) => vec![name.to_string()],
        None => folder.names().unwrap_or_else(|error| {
            let place = folder.directory().display().to_string();
            let expected = "a folder that can be read";
            faults.push(Finding::new(
                Fault::FileUnreadable,
                place,
                error.to_string(),
                expected,
            ));
            vec![]
        }),
    };
    let has = |name: &str| names.iter().any(|known| known == name);
    for model in in_order(has("params.json"), has("config.json")) {
        let index = format!("{model}.index.json");
        if has(&index) {
            let Some(map) = read_index(folder, &index, faults) else {
                break;
            };
            return listed(folder, &index, map, &names, faults);
        }
        if has(model) {
            return all(folder, &[model], faults);
        }
    }
    let others = names.iter().filter(|name| name.ends_with(".safetensors"));
    let others: Vec<&str> = others.map(String::as_str).collect();
    let numbered: Vec<(&str, Shard<'_>)> = others
        .iter()
        .filter_map(|name| Some((*name, Shard::of(name)?)))
        .collect();
    match (others.as_slice(), numbered.first()) {
        ([file], None) => all(folder, &[*file], faults),
        (_, Some((_, first))) => {
            let own = numbered
                .iter()
                .filter(|(_, shard)| shard.stem == first.stem);
            let (own, numbers): (Vec<&str>, BTreeSet<usize>) =
                own.map(|(name, shard)| (*name, shard.number)).unzip();
            if !faults
                .iter()
                .any(|finding| finding.fault == Fault::IndexInvalid)
            {
                let found = format!("{} of {} shards, no index", own.len(), first.count);
                let name = format!("{}.safetensors.index.json", first.stem);
                let expected = "an index that maps each tensor to its shard";
                faults.push(Finding::new(Fault::IndexMissing, name, found, expected));
            }
            // The count comes from a name, so no more than a few are listed.
            let missing = (1..=first.count).filter(|number| !numbers.contains(number));
            for number in missing.take(MANY) {
                let name = first.name(number);
                faults.push(Finding::new(
                    Fault::FileMissing,
                    name,
                    "no such file",
                    "the shard",
                ));
            }
            all(folder, &own, faults)
        }
        (files, None) => {
            let found = match files {
                [] => "no safetensors file".to_string(),
                files => format!("{} safetensors files without an index", files.len()),
            };
            let place = folder.directory().display().to_string();
            let expected = "model.safetensors or its index";
            faults.push(Finding::new(Fault::NoWeights, place, found, expected));
            Shards::default()
        }
    }
}

/// A limit for findings whose number comes from the file.
const MANY: usize = 1000;

/// `STEM-00001-of-00004.safetensors`.
struct Shard<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
    digits: usize,
}

impl<'a> Shard<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        Some(Self {
            stem,
            number: number.parse().ok()?,
            count: count.parse().ok()?,
            digits: number.len(),
        })
    }

    fn name(&self, number: usize) -> String {
        let Self {
            stem,
            count,
            digits,
            ..
        } = self;
        let digits = (*digits).min(20);
        format!("{stem}-{number:0digits$}-of-{count:0digits$}.safetensors")
    }
}

fn read_index(
    folder: &dyn Folder,
    name: &str,
    faults: &mut Vec<Finding>,
) -> Option<BTreeMap<String, String>> {
    let mut invalid = |subject: &str, found: String| {
        let expected = "`weight_map`, which maps each tensor to a file beside it";
        faults.push(Finding::new(Fault::IndexInvalid, subject, found, expected));
    };
    let text = match read_text(folder.directory().join(name), MAX_INDEX) {
        Ok(text) => text,
        Err(error) => {
            invalid(name, error.to_string());
            return None;
        }
    };
    let json: Value = match serde_json::from_str(&text) {
        Ok(json) => json,
        Err(error) => {
            invalid(name, error.to_string());
            return None;
        }
    };
    let Some(Value::Object(map)) = json.get("weight_map") else {
        invalid(name, "there is no object `weight_map`".into());
        return None;
    };
    if map.is_empty() {
        invalid(name, "its `weight_map` is empty".into());
        return None;
    }
    let mut files = BTreeMap::new();
    for (tensor, file) in map {
        let is_plain =
            |file: &&str| !file.is_empty() && !file.contains("..") && !file.starts_with('/');
        match file.as_str().filter(is_plain) {
            Some(file) => {
                files.insert(tensor.clone(), file.to_string());
            }
            None => invalid(tensor, format!("it is said to be in {file}")),
        }
    }
    Some(files)
}

/// The files that the index names.
fn listed(
    folder: &dyn Folder,
    index: &str,
    map: BTreeMap<String, String>,
    names: &[String],
    faults: &mut Vec<Finding>,
) -> Shards {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for file in map.values() {
        *counts.entry(file).or_default() += 1;
    }
    let is_there = |file: &str| match file.contains('/') {
        true => folder.open(file).is_ok(),
        false => names.iter().any(|name| name == file),
    };
    let (there, missing): (Vec<_>, Vec<_>) = counts.iter().partition(|(file, _)| is_there(file));
    for (file, count) in missing {
        let found = format!("no such file, though {index} says that {count} tensors are in it");
        faults.push(Finding::new(Fault::FileMissing, *file, found, "the shard"));
    }
    let there: Vec<&str> = there.into_iter().map(|(file, _)| *file).collect();
    for name in names
        .iter()
        .filter(|name| !counts.contains_key(name.as_str()))
    {
        let stems = there.iter().filter_map(|file| Shard::of(file));
        let is_shard = Shard::of(name)
            .is_some_and(|shard| stems.into_iter().any(|other| other.stem == shard.stem));
        if is_shard {
            let found = format!("it is not in {index}");
            let expected = "only shards that the index names";
            faults.push(Finding::new(Fault::FileNotInIndex, name, found, expected));
        }
    }
    let mut shards = Shards::default();
    let mut opened: HashMap<&str, usize> = HashMap::new();
    for file in there {
        if let Some(open) = open_file(folder, file, faults) {
            opened.insert(file, shards.files.len());
            shards.files.push(open);
        }
    }
    let mut holders: HashMap<String, Vec<usize>> = HashMap::new();
    for (at, file) in shards.files.iter().enumerate() {
        for name in file.names() {
            holders.entry(name).or_default().push(at);
        }
    }
    let place = |at: usize| shards.files[at].path().file_name().unwrap_or_default();
    for (tensor, file) in &map {
        let Some(at) = opened.get(file.as_str()).copied() else {
            continue;
        };
        let held = holders.get(tensor).map_or(&[][..], Vec::as_slice);
        if held.contains(&at) {
            shards.index.insert(tensor.clone(), at);
            continue;
        }
        let found = match held.first() {
            Some(other) => format!("it is in {}", place(*other).display()),
            None => "no shard has it".into(),
        };
        if let Some(other) = held.first() {
            shards.index.insert(tensor.clone(), *other);
        }
        let expected = format!("in {file}, as {index} says");
        faults.push(Finding::new(
            Fault::IndexTensorMissing,
            tensor,
            found,
            expected,
        ));
    }
    for (tensor, held) in holders
        .iter()
        .filter(|(tensor, _)| !map.contains_key(*tensor))
    {
        let found = format!("in {}", place(held[0]).display());
        let expected = format!("an entry in {index}");
        faults.push(Finding::new(
            Fault::TensorNotInIndex,
            tensor,
            found,
            expected,
        ));
        shards.index.insert(tensor.clone(), held[0]);
    }
    shards
}

/// Files without an index.
fn all(folder: &dyn Folder, names: &[&str], faults: &mut Vec<Finding>) -> Shards {
    let mut shards = Shards::default();
    for name in names {
        let Some(file) = open_file(folder, name, faults) else {
            continue;
        };
        let at = shards.files.len();
        for tensor in file.names() {
            match shards.index.get(&tensor) {
                None => {
                    shards.index.insert(tensor, at);
                }
                Some(first) => {
                    let first = shards.files[*first].path().file_name().unwrap_or_default();
                    let found = format!("in {} and in {name}", first.display());
                    faults.push(Finding::new(
                        Fault::DuplicateTensor,
                        tensor,
                        found,
                        "in one file",
                    ));
                }
            }
        }
        shards.files.push(file);
    }
    shards
}

fn open_file(
    folder: &dyn Folder,
    name: &str,
    faults: &mut Vec<Finding>,
) -> Option<SafetensorsFile> {
    let (reader, length) = match folder.open(name) {
        Ok(opened) => opened,
        Err(error) => {
            let expected = "a file that can be read";
            faults.push(Finding::new(
                Fault::FileUnreadable,
                name,
                error.to_string(),
                expected,
            ));
            return None;
        }
    };
    // Also looked at if the header is refused.
    let start = header::start(&*reader, length);
    let file = match SafetensorsFile::of_reader(&folder.place(name), reader, length) {
        Ok(file) => file,
        Err(error) => {
            header::diagnose(name, &start, length, &error, || folder.open(name), faults);
            return None;
        }
    };
    let expected = file.expected_length();
    let fault = match length.cmp(&expected) {
        std::cmp::Ordering::Less => Fault::FileTruncated,
        std::cmp::Ordering::Greater => Fault::FileTooLong,
        std::cmp::Ordering::Equal => return Some(file),
    };
    let mut found = format!("{} bytes", file.length());
    if let Some(first) = file.names().find(|tensor| !file.is_whole(tensor)) {
        found += &format!("; `{first}` is cut off");
    }
    let expected = format!("{expected} bytes, as its header says");
    faults.push(Finding::new(fault, name, found, expected));
    Some(file)
}
