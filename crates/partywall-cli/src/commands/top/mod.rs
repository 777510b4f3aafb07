//! `partywall top`: a live view of a domain.
//!
//! With `--json` it prints an object a line, one for each repetition, or a single one with `--once`:
//!
//! - `seconds`: the time over which rates were measured;
//! - `broker`: what `partywall status --json` prints, with the members;
//! - `names`: those of `partywall ls --json`, each with `rate` (samples of a topic or results of a queue per second;
//!   else, and for a new name, null) and `detail` (of a pool, topic or queue what `partywall show --json` prints, else
//!   null);
//! - `left_out`: pools, topics and queues without `detail`, because there are more than [`MOST`];
//! - `timelines` (each with `rate`, values per second) and `semaphores` as in `partywall ls --json`;
//! - `waits`: members that wait for others, a list of `on` (`subscriber`: that it takes a sample; `block`, `permit`; of
//!   a queue `room`: for the input of a task, `result`: for its result, `block`: for either; `commit`, `withdrawal` or
//!   `growth` of a version; `timeline`: for a value), `name` (of the topic, pool, queue, semaphore, segment or
//!   timeline), `target` (the version of the segment, null if any will do, or the value of the timeline; else null),
//!   `pid`, `waits_for` (the pids of those that can end the wait) and `ms` (for how long; null if that is not known).

mod app;
mod draw;
#[cfg(test)]
mod example;
mod picture;
mod rates;
mod screen;
mod tables;
mod worker;

use std::{
    io::IsTerminal,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{ErrorKind, Location};
use ratatui::crossterm::event::{self, Event};

use self::{
    app::App,
    picture::Picture,
    rates::Rates,
    screen::{Keyboard, Screen},
    tables::View,
};
use crate::{
    Context, describe,
    failure::Failure,
    output::{self, Output},
    repeat::{parse_interval, pause},
    signals,
    snapshot::{Observer, Snapshot},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Print everything once, as text or with --json as an object, and end
    #[arg(long)]
    once: bool,
    /// Update the view every SECONDS
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    every: Duration,
}

/// Pools, topics and queues that are asked about in detail, as `partywall metrics` does by default.
const MOST: usize = 1000;

/// How long numbers are counted for the first rates that are printed.
const MEASURED: Duration = Duration::from_millis(250);

/// How long the program sleeps while no key is pressed. Reports of the worker and signals wait for this long.
const POLL: Duration = Duration::from_millis(50);

/// How old a frame may be: times on it grow, and the terminal may have another size.
const REDRAW: Duration = Duration::from_millis(500);

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let is_live = !arguments.once && !output.is_json();
    if is_live {
        check_terminal()?;
    }
    let location = context.options().location()?;
    let mut observer = Observer::new(context);
    let first = Snapshot::take(observer.domain()?, MOST)?;
    if is_live {
        return live(observer, first, location, arguments.every);
    }
    print(output, &mut observer, first, &location, arguments)
}

/// Refuses a live view unless output and input are terminals.
fn check_terminal() -> Result<(), Failure> {
    let refused = |why: &str| {
        let advice = "run it in a terminal, or use --once for text or --json for a program";
        Err(Failure::new(ErrorKind::Usage, format!("cannot show a live view: {why}"), advice))
    };
    if !std::io::stdout().is_terminal() {
        return refused("standard output is not a terminal");
    }
    if !std::io::stdin().is_terminal() {
        return refused("standard input is not a terminal");
    }
    if std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        return refused("the terminal cannot move its cursor (TERM is dumb)");
    }
    Ok(())
}

/// Prints pictures: one, or one after each interval until Ctrl-C or the end of the reader.
fn print(
    output: Output,
    observer: &mut Observer,
    first: Snapshot,
    location: &Location,
    arguments: &Arguments,
) -> Result<(), Failure> {
    let stop = if arguments.once { AtomicBool::new(false).into() } else { signals::cancel_flag()? };
    let mut rates = Rates::default().next(&first);
    let mut before = first.taken;
    if !pause(output, MEASURED, &stop) {
        return Ok(());
    }
    loop {
        let picture = Picture::new(Snapshot::take(observer.domain()?, MOST)?, &rates);
        let seconds = (picture.snapshot.taken - before).as_secs_f64();
        output.value(&picture.to_json(location, seconds));
        text(output, &picture, location);
        if arguments.once || !pause(output, arguments.every, &stop) {
            return Ok(());
        }
        before = picture.snapshot.taken;
        rates = picture.rates;
    }
}

/// Prints all tables that have rows.
fn text(output: Output, picture: &Picture, location: &Location) {
    if output.is_json() {
        return;
    }
    for line in draw::summary(picture, location) {
        output.line(line);
    }
    for view in [View::Members].into_iter().chain(tables::LOWER) {
        let mut rows = view.rows(picture);
        if rows.is_empty() {
            continue;
        }
        tables::order(&mut rows, view.first_order(), false);
        output.line(format!("\n{}", view.name()));
        output.cells("", &view.headings(), &rows.into_iter().map(|row| row.cells).collect::<Vec<_>>());
    }
    if !describe::mps_daemons(&picture.snapshot.members).is_empty() {
        output.line(format!("\n{}", describe::MPS_PRICE));
    }
}

/// Shows the live view until a key or a signal ends it.
fn live(observer: Observer, first: Snapshot, location: Location, every: Duration) -> Result<(), Failure> {
    let end = signals::end_flag()?;
    let (ask, asked) = mpsc::channel();
    let (sender, reports) = mpsc::channel();
    let worker = std::thread::Builder::new().name("top".into());
    let worker = worker.spawn(move || worker::run(observer, every, &asked, &sender));
    let worker = worker.map_err(|source| partywall::Error::starting("a thread", source))?;
    let mut app = App::new(Picture::new(first, &Rates::default()), location, every, ask);
    let failed = |error| Failure::system("using the terminal", error);
    let mut screen = Screen::enter().map_err(failed)?;
    let has_colours = output::has_colours(&std::io::stdout());
    let mut drawn: Option<Instant> = None;
    while !end.load(Ordering::Relaxed) && !app.is_over() {
        let mut changed = drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW);
        loop {
            match reports.try_recv() {
                Ok(report) => {
                    app.hear(report);
                    changed = true;
                }
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => {
                    drop(screen);
                    // It ends by itself only when it panics, which has been printed.
                    let Err(panic) = worker.join() else { return Ok(()) };
                    std::panic::resume_unwind(panic);
                }
            }
        }
        match screen::wait_for_key(if changed { Duration::ZERO } else { POLL }).map_err(failed)? {
            Keyboard::Silent => {}
            Keyboard::Gone => return Ok(()),
            Keyboard::Interrupted => changed = true,
            // Several keys may have arrived at once, or only a part of one.
            Keyboard::Pressed => {
                while event::poll(Duration::ZERO).map_err(failed)? {
                    if let Event::Key(key) = event::read().map_err(failed)? {
                        app.key(key);
                        changed = true;
                    }
                }
            }
        }
        if app.suspends() {
            screen.suspend().map_err(failed)?;
        }
        if changed {
            let draw = |frame: &mut ratatui::Frame<'_>| {
                app.draw(frame);
                if !has_colours {
                    draw::remove_colours(frame.buffer_mut());
                }
            };
            screen.draw(draw).map_err(failed)?;
            drawn = Some(Instant::now());
        }
    }
    Ok(())
}
