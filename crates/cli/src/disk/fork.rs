//! `paravane disk fork`: a snapshot with overlays for other guests.
use super::args::ForkArgs;
use super::snapshot;
use crate::failure::Failure;
use std::process::ExitCode;

pub(crate) fn main(args: &ForkArgs) -> Result<ExitCode, Failure> {
    let Some((own, others)) = args.overlays.split_first() else {
        return Err(Failure::request(anyhow::anyhow!("no overlay: name one for each guest")));
    };
    snapshot::take(&args.device, own, others, &args.common)
}
