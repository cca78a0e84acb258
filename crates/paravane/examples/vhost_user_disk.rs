//! Serves a disk image over vhost-user until it is killed.
//!
//! ```sh
//! cargo run --example vhost_user_disk -- disk.img /tmp/disk.sock
//! ```
use paravane::device::blk::{Blk, BlkConfig};
use paravane::export::{Endpoint, Export};
use paravane::vhost::ExportConfig;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(image), Some(socket)) = (args.next(), args.next()) else {
        return Err("usage: vhost_user_disk IMAGE SOCKET".into());
    };
    let disk = Blk::open(BlkConfig::new(image))?;
    let config = ExportConfig::new("disk", Endpoint::Listen(socket.into()));
    Export::start(config, Box::new(disk))?.join()?;
    Ok(())
}
