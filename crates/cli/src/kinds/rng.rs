//! Entropy sources.
use super::checked::OptionError;
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Descriptors, Features, Kind, Spec, Texts};
use super::observe::Unobserved;
use super::opening::{Earlier, LinkEnds, OpenContext, Opened, Opening};
use super::texts::SERVE_ONE;
use clap::Args;
use paravane_command_line::sections::Sections;
use paravane_device::rng::Rng;
use std::any::Any;
use std::sync::Arc;

/// Serve an entropy source
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub(crate) struct RngSpec;

pub(crate) static RNG: Kind = Kind::new::<RngSpec>(
    "rng",
    Texts {
        sections: Sections {
            command: "paravane-serve-rng",
            examples: &[("paravane serve rng --socket /run/rng0.sock", "Serve an entropy source.")],
            ..SERVE_ONE
        },
        noun: "an entropy source",
        table: "An entropy source. Needs name, and one of socket, connect and socket-activation.",
        example: "[[rng]]\nname = \"vm0-rng\"\nsocket = \"/run/paravane/vm0-rng.sock\"\n",
    },
    Features { heading: "entropy sources", bits: &[], sometimes: &[], remark: "", samples: &[&[]] },
);

impl Arguments for RngSpec {
    fn check(&self, _: &str, _: &EndpointArgs) -> Result<Arc<dyn Spec>, OptionError> {
        Ok(Arc::new(RngSpec))
    }
}

impl Spec for RngSpec {
    fn kind(&self) -> &'static Kind {
        &RNG
    }

    fn is(&self, other: &dyn Spec) -> bool {
        (other as &dyn Any).is::<Self>()
    }

    fn descriptors(&self) -> Descriptors {
        Descriptors { own: 0, queues: 1 }
    }

    fn open(&self, _: &str, _: &OpenContext, _: &mut LinkEnds, _: Earlier) -> Result<Opening, anyhow::Error> {
        let back_end = "getrandom".to_owned();
        Ok(Opened { device: Box::new(Rng::new()), observer: Box::new(Unobserved), back_end, hold: None }
            .into())
    }
}
