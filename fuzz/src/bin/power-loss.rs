//! Explores the states that a power loss or a SIGKILL can leave of disk images.
//!
//! `cargo run -p paravane-fuzz --bin power-loss -- --filter qcow2 --states 10000`
use paravane_fuzz::power_loss::{Options, Report, explore, names};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: power-loss [--filter KINDS] [--states N] [--seconds S] [--runs N] [--seed N]
                  [--first yes|no] [--states-of-run N] [--bound N] [--qemu N] [--keep FOLDER]
       power-loss --list

  --filter KINDS     names of kinds, or parts of names, with commas between them [all]
  --states N         stop after N states [10000, unless --seconds or --runs is there]
  --seconds S        stop after S seconds
  --first yes        stop after the first finding [no]
  --runs N           stop after N runs of each kind
  --seed N           seed of the first run; the next one has N + 1 [1]
  --states-of-run N  states of a run [60]
  --bound N          try all subsets of up to N unflushed changes, and random ones of more [4]
  --qemu N           have qemu-img check one state in N, 0 for none [50]
  --keep FOLDER      save the images of findings
  --list             print the names of the kinds

exit status: 0: no finding; 1: a state is wrong; 2: usage or host";

fn options() -> Option<Options> {
    let mut options = Options::default();
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next()?;
        match name.as_str() {
            "--filter" => options.filter = value,
            "--states" => options.states = Some(value.parse().ok()?),
            "--seconds" => options.time = Some(Duration::from_secs(value.parse().ok()?)),
            "--runs" => options.runs = Some(value.parse().ok()?),
            "--first" => options.first = value == "yes",
            "--seed" => options.seed = value.parse().ok()?,
            "--states-of-run" => options.states_of_run = value.parse().ok()?,
            "--bound" => options.bound = value.parse().ok().filter(|bound| *bound <= 16)?,
            "--qemu" => options.qemu = value.parse().ok()?,
            "--keep" => options.keep = Some(value.into()),
            _ => return None,
        }
    }
    if options.states.is_none() && options.time.is_none() && options.runs.is_none() {
        options.states = Some(10_000);
    }
    Some(options)
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("--list") {
        names().iter().for_each(|name| println!("{name}"));
        return ExitCode::SUCCESS;
    }
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let (start, mut said, mut told) = (Instant::now(), Instant::now(), 0);
    let report = explore(&options, &mut |report: &Report| {
        for finding in &report.findings[told..] {
            eprintln!("WRONG {finding}");
        }
        told = report.findings.len();
        if said.elapsed() > Duration::from_secs(5) {
            said = Instant::now();
            let wrong: u64 = report.rows.iter().map(|row| row.wrong).sum();
            eprintln!("{:>6} s  {} states, {wrong} wrong", start.elapsed().as_secs(), report.states());
        }
    });
    match report {
        Err(error) => {
            eprintln!("power-loss: {error}");
            ExitCode::from(2)
        }
        Ok(report) => {
            print!("{report}");
            println!("{} states in {} s", report.states(), start.elapsed().as_secs());
            match report.findings.is_empty() {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }
        }
    }
}
