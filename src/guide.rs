//! The guide, by task. The code on its pages is compiled and run as tests.
//!
//! | you want to | page |
//! |---|---|
//! | add the library to a project, train a first model | [`start`] |
//! | see a whole training program | [`tour`] |
//! | know when a step begins and ends, and when scales change | [`steps`] |
//! | choose a recipe | [`choosing`] |
//! | give some layers, or some GEMMs, another recipe | [`mixed_recipes`] |
//! | validate while training | [`evaluation`] |
//! | train with batches larger than memory | [`micro_batches`] |
//! | build from whole transformer layers, with less memory | [`transformer`] |
//! | stop and resume a run, or continue an f32 run in FP8 | [`checkpoints`] |
//! | make an FP8 file, serve it, fine-tune from it | [`calibration`] |
//! | run, write and convert FP8 files of any family | [`models`] |
//! | serve a model to many callers at once | [`serving`] |
//! | generate what reinforcement learning trains on | [`rollouts`] |
//! | fine-tune a model of a folder, in full or by adapters | [`fine_tuning`] |
//! | make training data of texts, chats and labelled texts | [`training_data`] |
//! | find out why an FP8 file gives nonsense | [`checking`] |
//! | train adapters on an FP8 model | [`lora`] |
//! | see what casts do to your tensors | [`statistics`] |
//! | study FP8 without the hardware, as with the FP8 Emulation Toolkit | [`emulation`] |
//! | train with a scale for every tensor, without f32 copies | [`scaled`] |
//! | cast, scale and multiply by hand, without guard and layers | [`low_level`] |
//! | use several threads | [`threads`] |
//! | use several processes, several machines | [`distributed`] |
//! | use NVIDIA GPUs | [`gpus`] |
//! | see what was measured | [`benchmarks`] |
//! | handle errors | [`errors`] |
//! | port a model written for candle | [`migration`] |
//! | translate from torchao, Transformer Engine, IPEX, fp8layers or flax | [`coming_from`] |

macro_rules! pages {
    ($($name:ident $file:literal;)*) => {
        $(
            #[doc = include_str!(concat!("../docs/", $file))]
            pub mod $name {}
        )*

        #[cfg(test)]
        const PAGES: &[(&str, &str)] = &[$((stringify!($name), include_str!(concat!("../docs/", $file)))),*];
    };
}

pages! {
    start "guide/start.md";
    tour "guide/tour.md";
    steps "guide/steps.md";
    choosing "guide/choosing.md";
    mixed_recipes "guide/mixed_recipes.md";
    evaluation "guide/evaluation.md";
    micro_batches "guide/micro_batches.md";
    transformer "guide/transformer.md";
    checkpoints "guide/checkpoints.md";
    calibration "guide/calibration.md";
    models "guide/models.md";
    serving "guide/serving.md";
    rollouts "guide/rollouts.md";
    fine_tuning "guide/fine_tuning.md";
    training_data "guide/training_data.md";
    checking "guide/checking.md";
    lora "guide/lora.md";
    statistics "guide/statistics.md";
    emulation "guide/emulation.md";
    scaled "guide/scaled.md";
    low_level "guide/low_level.md";
    threads "guide/threads.md";
    distributed "guide/distributed.md";
    gpus "guide/gpus.md";
    benchmarks "benchmarks.md";
    errors "guide/errors.md";
    migration "migration.md";
    coming_from "coming_from.md";
}

#[cfg(test)]
mod tests {
    use super::PAGES;

    const README: &str = include_str!("../README.md");

    #[test]
    fn the_page_of_checks_has_a_row_for_every_fault() {
        use fp8_files::audit::Fault;
        let page = include_str!("../docs/guide/checking.md");
        for fault in Fault::ALL {
            let (code, severity) = (fault.code(), fault.severity());
            let row = format!(
                "| `{code}` | {severity} | {} | {} |",
                fault.what(),
                fault.help()
            );
            assert!(page.lines().any(|line| line == row), "{row}");
        }
        let rows = page.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, Fault::ALL.len());
    }

    /// The rows of a page's table whose first cells are names in backticks, and the cells after them.
    fn rows(page: &'static str) -> Vec<(&'static str, Vec<&'static str>)> {
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
        let row = |line: &'static str| {
            let (name, rest) = line.split_once("` | ")?;
            Some((name, rest.split(" | ").collect()))
        };
        rows.filter_map(row).collect()
    }

    #[test]
    fn tables_of_recipes_have_every_recipe_and_its_formats() {
        use crate::{Fp8LinearConfig, RecipeName};
        use fp8_core::Format;
        let table = rows(README);
        let names: Vec<RecipeName> = table
            .iter()
            .map(|(name, _)| name.parse().unwrap())
            .collect();
        for name in RecipeName::ALL {
            let times = names.iter().filter(|known| **known == name).count();
            assert_eq!(times, 1, "README has {times} rows for {name}");
        }
        // A cell begins with the format, or with `as` and a recipe whose cell does.
        let format = |name: &str, column: usize| -> Format {
            let cell = |name: &str| {
                let row = table.iter().find(|(known, _)| *known == name);
                row.unwrap().1[column]
            };
            let own = cell(name);
            let other = own.strip_prefix("as `").map(|rest| rest.split('`').next());
            let text = other.map_or(own, |other| cell(other.unwrap()));
            text[..4].parse().unwrap()
        };
        // The page on choosing has those for training, first those whose gradients are E5M2.
        let choosing = rows(include_str!("../docs/guide/choosing.md"));
        let emulated = [RecipeName::Direct, RecipeName::Hybrid];
        assert_eq!(choosing.len() + emulated.len(), RecipeName::ALL.len());
        for name in RecipeName::ALL {
            let config = Fp8LinearConfig::from_recipe_name(name).resolve().unwrap();
            for (column, casts) in [
                (0, [config.input, config.weight]),
                (1, [config.grad_output; 2]),
            ] {
                for cast in casts {
                    let expected = Some(format(name.as_str(), column));
                    assert_eq!(cast.format, expected, "{name}, column {column}");
                }
            }
            let place = choosing
                .iter()
                .position(|(known, _)| *known == name.as_str());
            assert_eq!(place.is_none(), emulated.contains(&name), "{name}");
            if let Some(place) = place {
                let is_e5m2 = config.grad_output.format == Some(Format::E5M2);
                assert_eq!(is_e5m2, place < 3, "{name}");
                assert_eq!(config.input.format, Some(Format::E4M3), "{name}");
            }
        }
    }

    #[test]
    fn links_lead_to_pages_or_the_web() {
        for (name, page) in PAGES.iter().copied().chain([("README", README)]) {
            for target in page.split("](").skip(1) {
                let target = target.split(')').next().unwrap();
                let known = ["crate::", "https://", "macro@crate::", "#"];
                assert!(
                    known.iter().any(|start| target.starts_with(start)),
                    "{name}: ({target}) is the path of a file, which rustdoc has no page for"
                );
            }
        }
        // For each link that README defines by the path of a file, lib.rs defines one to a page of this crate.
        let definitions = |text: &'static str, mark: &'static str| {
            let lines = text.lines().filter_map(move |line| line.strip_prefix(mark));
            lines.filter_map(|line| line.split_once("]: "))
        };
        let pages: Vec<_> = definitions(include_str!("lib.rs"), "//! [").collect();
        let mut files = 0;
        for (label, file) in definitions(README, "[") {
            let page = file.rsplit('/').next().unwrap().trim_end_matches(".md");
            assert!(
                pages.contains(&(label, &format!("guide::{page}"))),
                "README: [{label}]"
            );
            files += 1;
        }
        assert_eq!(files, pages.len());
    }
}
