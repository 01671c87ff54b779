//! Small sound models with one fault each: its code and its place are named.

mod configuration;
mod files;
mod inputs_and_codes;
mod model;
mod numbers;
mod tensors;

use crate::support::Model;
use fp8_files::audit::Fault;
use std::collections::BTreeSet;

/// A fault in a sound model.
pub struct Case {
    /// What was done.
    what: &'static str,
    sound: fn() -> Model,
    damage: fn(&mut Model),
    fault: Fault,
    /// The tensor, file or entry that the finding names; empty for the folder.
    subject: &'static str,
    /// Other kinds of faults that follow.
    also: &'static [Fault],
}

pub const fn case(
    what: &'static str,
    sound: fn() -> Model,
    damage: fn(&mut Model),
    fault: Fault,
    subject: &'static str,
) -> Case {
    Case {
        what,
        sound,
        damage,
        fault,
        subject,
        also: &[],
    }
}

impl Case {
    pub const fn also(mut self, also: &'static [Fault]) -> Self {
        self.also = also;
        self
    }
}

fn cases() -> Vec<Case> {
    [
        files::cases(),
        configuration::cases(),
        tensors::cases(),
        numbers::cases(),
        inputs_and_codes::cases(),
        model::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[test]
fn every_seeded_fault_is_named() {
    let cases = cases();
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut wrong = vec![];
    for case in &cases {
        let mut model = (case.sound)();
        (case.damage)(&mut model);
        let (dir, report) = model.check();
        let folder = dir.path().display().to_string();
        let subject = match case.subject {
            "" => folder.as_str(),
            subject => subject,
        };
        let is_named = report
            .findings
            .iter()
            .any(|finding| finding.fault == case.fault && finding.subject == subject);
        let kinds: BTreeSet<Fault> = report.groups().into_keys().collect();
        let expected: BTreeSet<Fault> = case.also.iter().copied().chain([case.fault]).collect();
        if !is_named || kinds != expected {
            let found: Vec<String> = report
                .findings
                .iter()
                .take(6)
                .map(|f| {
                    format!(
                        "{} `{}`: {}; expected {}",
                        f.fault, f.subject, f.found, f.expected
                    )
                })
                .collect();
            wrong.push(format!(
                "{} ({} `{subject}`):\n  {}",
                case.what,
                case.fault,
                found.join("\n  ")
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn every_kind_of_fault_has_a_case() {
    let seeded: BTreeSet<Fault> = cases().iter().map(|case| case.fault).collect();
    let without: Vec<&Fault> = Fault::ALL
        .iter()
        .filter(|fault| !seeded.contains(fault))
        .collect();
    // What has no kind of its own.
    assert_eq!(without, [&Fault::Refused]);
}
