//! Warnings of the library, for people: each once, however many nodes give it.

use std::fmt::Debug;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::output;

/// The most different warnings that are kept apart; those beyond are dropped.
const TEXTS_MAX: usize = 100;

/// The warnings of this process so far, and how often each was given.
static GIVEN: Mutex<Vec<(String, u64)>> = Mutex::new(Vec::new());

/// Whether this process shows its warnings; otherwise another one does. Guards no other data.
static SHOWN: AtomicBool = AtomicBool::new(true);

/// Shows warnings, each once. With `RUST_LOG` set, shows what it asks for, each time.
pub(crate) fn show() {
    if std::env::var_os("RUST_LOG").is_some() {
        return show_log(EnvFilter::from_default_env());
    }
    tracing_subscriber::registry().with(Warnings).init();
}

/// Shows what `RUST_LOG` asks for, or else all but what is for debugging: each time, with the time.
#[cfg(feature = "server")]
pub(crate) fn log() {
    let usual = EnvFilter::builder().with_default_directive(Level::INFO.into());
    show_log(usual.from_env_lossy());
}

fn show_log(filter: EnvFilter) {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !is_plain)
        .with_env_filter(filter)
        .init();
}

/// Keeps warnings for [`take`] and shows none.
pub(crate) fn keep() {
    SHOWN.store(false, Ordering::Relaxed);
    tracing_subscriber::registry().with(Warnings).init();
}

/// The warnings that were kept.
pub(crate) fn take() -> Vec<(String, u64)> {
    std::mem::take(&mut GIVEN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Shows or keeps a warning, unless it was given before.
pub(crate) fn give(text: &str, times: u64) {
    if count(text, times) && SHOWN.load(Ordering::Relaxed) {
        output::note(&format!("warning: {text}"));
    }
}

/// Says how often the warnings came that came more than once.
pub(crate) fn finish() {
    for (text, times) in take().into_iter().filter(|&(_, times)| times > 1) {
        output::note(&format!("warning: given {times} times: {text}"));
    }
}

/// Returns whether the warning is new.
fn count(text: &str, times: u64) -> bool {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, before)) = given.iter_mut().find(|(known, _)| known == text) {
        *before += times;
        return false;
    }
    let has_room = given.len() < TEXTS_MAX;
    if has_room {
        given.push((text.to_owned(), times));
    }
    has_room
}

struct Warnings;

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() > Level::WARN {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        give(&(text.message + &text.error), 1);
    }
}

/// What a warning says, and why; not which node or lane says it.
#[derive(Default)]
struct Text {
    message: String,
    error: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "error" => self.error = format!(": {value:?}"),
            _ => {}
        }
    }
}
