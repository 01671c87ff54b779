//! The findings that follow from the loader's errors.

use super::fault::Fault;
use super::report::Finding;
use super::scales::Numbers;
use super::values;
use crate::error::Error;
use crate::load::survey::Survey;
use crate::names::split;

/// Bytes that are read of a scale with the wrong dtype.
const SAMPLE: usize = 1 << 20;

/// The findings for everything that the loader refuses.
pub(super) fn findings(survey: &Survey) -> Vec<Finding> {
    let refused = survey.refused.iter();
    let mut found: Vec<Finding> = refused
        .filter_map(|(error, name)| finding(survey, error, name))
        .collect();
    let weights = |fault: Fault| found.iter().filter(|f| f.fault == fault).count();
    let misspelt = weights(Fault::ScaleSpelling);
    if misspelt > survey.layers().count() && survey.has_source() {
        let says = format!("the configuration of {}", survey.family());
        let first = found.iter().find(|f| f.fault == Fault::ScaleSpelling);
        let example = first.map(|f| f.found.clone()).unwrap_or_default();
        let expected = "the configuration of the family that has these names";
        let found_text = format!("{says}, {misspelt} scales of another family ({example})");
        found.push(Finding::new(
            Fault::ConfigOfOther,
            "quantization_config",
            found_text,
            expected,
        ));
    }
    found
}

/// The finding of an error that occurred at the tensor stored as `name`; None if another finding says the same.
fn finding(survey: &Survey, error: &Error, name: &str) -> Option<Finding> {
    let new = |fault, subject: &str, found: String, expected: &str| {
        Some(Finding::new(fault, subject, found, expected))
    };
    match error {
        Error::MissingScale {
            tensor, missing, ..
        } => match survey.other_spelling(tensor) {
            Some(scale) => {
                let found = format!("`{}` in a file of {}", scale.name, survey.family());
                new(Fault::ScaleSpelling, tensor, found, &format!("`{missing}`"))
            }
            None => new(
                Fault::ScaleMissing,
                tensor,
                "no scale".into(),
                &format!("`{missing}`"),
            ),
        },
        Error::TensorDType {
            tensor,
            got,
            expected,
        } => dtype(survey, tensor, got, expected, name),
        Error::TensorShape {
            tensor,
            got,
            expected,
        } => {
            let found = format!("{got:?}");
            if tensor == name && !is_scale(name) {
                return new(Fault::WeightShape, name, found, expected);
            }
            let turned: Vec<usize> = got.iter().rev().copied().collect();
            let is_turned = turned != *got && survey.takes_shape(name, &turned);
            match is_turned {
                true => new(
                    Fault::ScaleTransposed,
                    tensor,
                    found,
                    &format!("{turned:?}"),
                ),
                // Without a configuration nothing is known about blocks.
                false if !survey.is_configured => None,
                false => new(Fault::ScaleShape, tensor, found, expected),
            }
        }
        Error::TensorValue {
            tensor,
            index,
            value,
            expected,
        } => {
            let fault = match tensor.ends_with("zero_point") {
                true => Fault::ZeroPoint,
                false => Fault::KvScaleConflict,
            };
            new(
                fault,
                tensor,
                format!("{value:e} at index {index}"),
                expected,
            )
        }
        Error::SchemeMismatch { says, found, .. } => match says.contains("high precision") {
            true => {
                let found = format!("FP8 codes, while the configuration {says}");
                new(
                    Fault::IgnoredLayerQuantized,
                    name,
                    found,
                    "a layer that the configuration quantizes",
                )
            }
            false => new(
                Fault::InputScaleUnused,
                name,
                found.clone(),
                &format!("none: the configuration {says}"),
            ),
        },
        Error::MissingTensor { tensor, .. } => new(
            Fault::InputScaleMissing,
            tensor,
            "no such tensor".into(),
            "a scale, since inputs are static",
        ),
        Error::Ambiguous {
            path,
            tensor,
            first,
            second,
        } => {
            let in_config = path
                .extension()
                .is_some_and(|extension| extension == "json");
            let (fault, subject) = match in_config {
                true => (Fault::ConfigAmbiguous, tensor),
                false => (Fault::DuplicateSpelling, second),
            };
            new(
                fault,
                subject,
                format!("`{first}` and `{second}`"),
                "one of them",
            )
        }
        Error::ForeignFormat { tensor, format, .. } => new(
            Fault::ForeignFormat,
            tensor,
            format.clone(),
            "a format with F8_E4M3 weights",
        ),
        Error::UnsupportedScheme {
            key,
            value,
            expected,
            ..
        } => new(Fault::ConfigUnsupported, key, value.clone(), expected),
        Error::Pattern {
            pattern, reason, ..
        } => new(
            Fault::ConfigUnsupported,
            pattern,
            reason.clone(),
            "a pattern that can be matched",
        ),
        Error::Json { path, what, reason } => {
            let place = path.file_name().unwrap_or_default().display().to_string();
            let expected = format!("valid JSON for {what}");
            new(Fault::ConfigInvalid, &place, reason.clone(), &expected)
        }
        Error::Read { path, source } => {
            let place = path.file_name().unwrap_or_default().display().to_string();
            new(
                Fault::FileUnreadable,
                &place,
                source.to_string(),
                "a file that can be read",
            )
        }
        // The files were compared with their headers before.
        Error::NotSafetensors { .. } => None,
        error => new(
            Fault::Refused,
            name,
            error.to_string(),
            "a checkpoint that loads",
        ),
    }
}

fn is_scale(name: &str) -> bool {
    split(name).1.contains("scale")
}

/// The finding of a tensor with the wrong dtype. `name` is the scale if the weight of that scale is missing or not FP8.
fn dtype(survey: &Survey, tensor: &str, got: &str, expected: &str, name: &str) -> Option<Finding> {
    if tensor == name || !is_scale(name) {
        let fault = match tensor == name && !is_scale(name) {
            true => Fault::WeightDtype,
            false => {
                let numbers = survey
                    .tensor(tensor)
                    .and_then(|scale| Numbers::read(scale, SAMPLE));
                match numbers.filter(Numbers::all_bytes) {
                    Some(numbers) => return Some(e8m0(tensor, got, &numbers, expected)),
                    None => Fault::ScaleDtype,
                }
            }
        };
        return Some(Finding::new(fault, tensor, got, expected));
    }
    let stored = survey.values().find(|(canonical, _)| *canonical == tensor);
    let Some((_, weight)) = stored else {
        // A weight that is refused for another reason has its own finding.
        let expected = format!("the weight `{tensor}`");
        return Some(Finding::new(
            Fault::ScaleWithoutWeight,
            name,
            "no such weight",
            expected,
        ));
    };
    if let "U8" | "I8" = got {
        let expected = "F8_E4M3, the same bytes";
        return Some(Finding::new(
            Fault::CodesAsBytes,
            weight.name,
            got,
            expected,
        ));
    }
    if let Some(amax) = values::codes_without_scale(weight) {
        let found = format!("{got} values that are all FP8 codes, up to {amax}, beside `{name}`");
        let expected = "F8_E4M3 codes, or values times their scale";
        return Some(Finding::new(
            Fault::CodesAsValues,
            weight.name,
            found,
            expected,
        ));
    }
    let found = format!("{got}, beside `{name}`");
    let expected = "F8_E4M3, or no scale";
    Some(Finding::new(
        Fault::ScaledWeightNotFp8,
        weight.name,
        found,
        expected,
    ))
}

/// The finding of exponent bytes that are stored as numbers.
fn e8m0(tensor: &str, got: &str, numbers: &Numbers, expected: &str) -> Finding {
    let first = numbers.first;
    let found = format!("{got}, whole numbers from 1 to 254 (the first is {first})");
    Finding::new(Fault::E8m0AsFloat, tensor, found, expected)
}
