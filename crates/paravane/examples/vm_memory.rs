//! A vhost-user client's memory through the traits of the crate vm-memory.
//!
//! Takes one client and answers it until it shares its memory. Then the program reads a text at
//! guest-physical address 0x1000 and writes it back at 0x3000, in capital letters, by the methods
//! of `vm_memory::Bytes`. The write is in the dirty log, as a device's would be.
//!
//! ```sh
//! cargo run --example vm_memory --features vm-memory -- /tmp/memory.sock
//! ```
use paravane::dma::MappingQuota;
use paravane::dma::interop::View;
use paravane::dma::{DirtyLog, DirtyPages};
use paravane::export::socket::{Connection, Received};
use paravane::spec::feature;
use paravane::spec::vhost_user::{flags, request};
use paravane::vhost::memory::ClientMemory;
use paravane::vhost::message::{FRAMING, Parts, message, split};
use std::os::unix::net::UnixListener;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const TEXT: GuestAddress = GuestAddress(0x1000);
const ANSWER: GuestAddress = GuestAddress(0x3000);
const PAGE: u64 = 4096;

type Error = Box<dyn std::error::Error>;

/// Answers the client until it has shared its memory.
fn shared_memory(connection: &mut Connection) -> Result<ClientMemory, Error> {
    let mut memory = ClientMemory::new(MappingQuota::default())?;
    loop {
        match connection.receive()? {
            Received::Closed => return Err("the client has closed the connection".into()),
            Received::Nothing => std::thread::sleep(Duration::from_millis(1)),
            Received::Message(fds) => {
                let (header, payload) = split(connection.message())?;
                let mut parts = Parts::new(header.request, payload, fds)?;
                match header.request {
                    request::SET_MEM_TABLE => {
                        memory.publish(memory.with_all(parts.table()?)?)?;
                        return Ok(memory);
                    }
                    request::GET_FEATURES => {
                        let features = feature::VERSION_1.to_le_bytes();
                        let reply = message(header.request, flags::VERSION | flags::REPLY, &features);
                        connection.send(&reply, None)?;
                    }
                    // SET_OWNER, SET_FEATURES and others that have no answer.
                    _ => {}
                }
            }
        }
    }
}

fn main() -> Result<(), Error> {
    let socket = std::env::args().nth(1).ok_or("usage: vm_memory SOCKET")?;
    let (stream, _) = UnixListener::bind(socket)?.accept()?;
    let mut connection = Connection::new(stream.into(), &FRAMING);
    let client = shared_memory(&mut connection)?;

    // From here on every write is marked.
    let memory = client.memory();
    memory.start_log(DirtyLog::new(memory.end(), PAGE)?, Duration::from_secs(1))?;

    let view = View::new(memory)?;
    for region in view.iter() {
        println!("{:#x} bytes at {:#x}", region.len(), region.start_addr().0);
    }
    let mut text = [0; 32];
    view.read_slice(&mut text, TEXT)?;
    text.make_ascii_uppercase();
    view.write_slice(&text, ANSWER)?;

    let mut dirty = DirtyPages::new(0, memory.end(), PAGE)?;
    if let Some(log) = memory.log() {
        log.harvest(&mut dirty);
    }
    for page in dirty.iter() {
        println!("dirty page at {page:#x}");
    }
    Ok(())
}
