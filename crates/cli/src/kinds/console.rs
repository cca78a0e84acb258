//! Consoles.
mod args;
mod open;
mod texts;

use super::changes::{Change, Effect, differences};
use super::checked::{OptionError, directory_of};
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Claim, Descriptors, Kind, Resource, Spec};
use super::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::serve::sandbox::paths::AllowedPaths;
use crate::serve::told::Told;
use args::Console;
use landlock::AccessFs;
use paravane_device::console::Window;
use paravane_spec::console::{Config, F_SIZE, RECEIVE};
use paravane_vhost::KnownToDriver;
use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Smallest and largest value of --buffer, in bytes.
const BUFFERS: [u64; 2] = [4 << 10, 1 << 30];
const WINDOW: &str = "window";

pub(crate) static CONSOLE: Kind = Kind {
    recorded,
    // Buffers for input that has not come yet are left in the ring.
    takes_at_once: |queue| queue != RECEIVE,
    ..Kind::new::<Console>("console", texts::TEXTS, texts::FEATURES)
};

fn recorded(known: &KnownToDriver, told: &mut Told) {
    let Ok((config, _)) = Config::read_from_prefix(&known.config) else { return };
    if known.features & F_SIZE != 0 {
        told.put(WINDOW, size(config.cols.get(), config.rows.get()));
    }
}

fn size(columns: u16, rows: u16) -> String {
    format!("{columns}x{rows}")
}

impl Arguments for Console {
    fn check(&self, _: &str, _: &EndpointArgs) -> Result<Arc<dyn Spec>, OptionError> {
        let [least, most] = BUFFERS;
        match self.buffer.0 {
            size if (least..=most).contains(&size) => Ok(Arc::new(self.clone())),
            size => Err(("buffer", format!("{size} bytes is out of range: use 4k to 1G"))),
        }
    }
}

impl Spec for Console {
    fn kind(&self) -> &'static Kind {
        &CONSOLE
    }

    fn is(&self, other: &dyn Spec) -> bool {
        (other as &dyn Any).downcast_ref() == Some(self)
    }

    fn resolved(&self, base: &Path) -> Option<Arc<dyn Spec>> {
        let resolve = |path: &Option<PathBuf>| path.as_ref().map(|path| base.join(path));
        let (terminal_socket, log) = (resolve(&self.terminal_socket), resolve(&self.log));
        Some(Arc::new(Self { terminal_socket, log, ..self.clone() }))
    }

    fn claims(&self) -> Vec<Claim> {
        let claim = |(option, path): (_, &Path)| {
            let resource = Resource::Path(path.to_owned());
            Claim { option, resource, shares: false, writes: true }
        };
        self.path().map(claim).into_iter().collect()
    }

    fn allow(&self, allowed: &mut AllowedPaths, _: bool) {
        let terminal = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        match (&self.terminal_socket, &self.log) {
            (Some(path), _) => allowed.socket(path),
            (None, Some(path)) if path.exists() => allowed.allow(path, AccessFs::WriteFile.into()),
            (None, Some(path)) => {
                allowed.allow(directory_of(path), AccessFs::MakeReg | AccessFs::WriteFile);
            }
            (None, None) => ["/dev/ptmx", "/dev/pts"].map(Path::new).into_iter().for_each(|path| {
                allowed.allow(path, terminal);
            }),
        }
    }

    fn descriptors(&self) -> Descriptors {
        // The terminal and who has it open, and the events of the thread between.
        Descriptors { own: 6, queues: 2 }
    }

    fn open(&self, _: &str, _: &OpenContext, _: &mut LinkEnds, _: Earlier) -> Result<Opening, anyhow::Error> {
        open::open(self).map(Into::into)
    }

    fn prepare(&self, _: &str, _: &OpenContext) -> Result<Option<Opening>, anyhow::Error> {
        // The running daemon has the terminal.
        Ok(Some(Opening::Late(Told::default())))
    }

    fn told(&self, told: &mut Told) {
        if let Some(Window { columns, rows }) = self.window {
            told.put(WINDOW, size(columns, rows));
        }
    }

    fn changes(&self, wanted: &dyn Spec, all: &mut Change) {
        let Some(wanted) = (wanted as &dyn Any).downcast_ref::<Self>() else { return };
        let key = wanted.path().map_or("pty", |(option, _)| option);
        let terminal = |console: &Self| (console.terminal_socket.clone(), console.pty, console.log.clone());
        all.add(key, Effect::Restart, terminal(self) != terminal(wanted));
        differences!(
            all, Console, self, wanted,
            window "window" Restart,
            buffer "buffer" Restart;
            but terminal_socket pty log
        );
    }
}
