//! Warnings for programs with and without a log.

/// Says `text` by `tracing`, or on stderr as `warning: ..` if the process has set no subscriber, so that whoever runs the program sees it.
pub fn warn(text: &str) {
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}
