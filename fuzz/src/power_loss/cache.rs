//! The cache of an object of an HTTP server, on a host that loses its power.
//!
//! None of it is ever flushed: each sector of its files may be that of any version, and a new file may be
//! missing. The next process reads what the server has, or nothing.
use super::stamp::{self, SECTOR};
use paravane_device::blk::images::{Disk, Use};
use paravane_device::blk::{Format, LayerSource};
use paravane_store::{CacheConfig, Direct, Object, ObjectOptions, Store};
use paravane_test_support::{Random, torn};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Name of this kind.
pub(super) const NAME: &str = "http-cache";

const CHUNK: usize = 4096;
/// Bytes of the object; its last chunk is short.
const SIZE: usize = 48 * CHUNK + 3 * SECTOR;
/// Most chunks in the cache, so that some are evicted.
const MOST: u64 = 32;

/// Crashes after which some chunk has survived one.
const ENOUGH: usize = 20;

/// What the files of a folder may hold.
type Versions = BTreeMap<OsString, Vec<Vec<u8>>>;

/// Uses a cache and loses power, time after time. Returns the number of crashes.
///
/// # Errors
/// What is wrong, after how many crashes.
pub(super) fn run(random: &mut Random, crashes: usize) -> Result<usize, (usize, String)> {
    let text = |error: std::io::Error| (0, error.to_string());
    let server = Server::start().map_err(text)?;
    let folder = tempfile::tempdir().map_err(text)?;
    let (mut crashed, mut kept) = (BTreeMap::new(), 0);
    for crash in 0..=crashes {
        let life = folder.path().join(crash.to_string());
        let (versions, found) = live(&server, &life, crashed, random).map_err(|what| (crash, what))?;
        kept += found;
        crashed = BTreeMap::new();
        for (name, versions) in versions {
            if versions.len() > 1 || !random.once_in(8) {
                crashed.insert(name, torn(&versions, random));
            }
        }
        // What still runs of the life before has the files of its own folder.
        fs::remove_dir_all(&life).map_err(text)?;
    }
    match kept {
        0 if crashes >= ENOUGH => Err((crashes, "no crash leaves anything of the cache".into())),
        _ => Ok(crashes),
    }
}

/// A process with a cache of these files. Returns what they may hold after a crash, and how many bytes of
/// chunks were there.
fn live(
    server: &Server,
    folder: &Path,
    files: BTreeMap<OsString, Vec<u8>>,
    random: &mut Random,
) -> Result<(Versions, u64), String> {
    let text = |error: std::io::Error| error.to_string();
    fs::create_dir(folder).map_err(text)?;
    for (name, bytes) in &files {
        fs::write(folder.join(name), bytes).map_err(text)?;
    }
    let mut versions: Versions = files.into_iter().map(|(name, bytes)| (name, vec![bytes])).collect();
    // The object is another one at times.
    if random.once_in(4) {
        server.version.fetch_xor(1, Ordering::SeqCst);
    }
    let config = CacheConfig {
        limit_bytes: MOST * CHUNK as u64,
        chunk_bytes: CHUNK as u32,
        read_ahead: 2 * CHUNK as u32,
        ..CacheConfig::new(folder)
    };
    let url = server.url.parse().map_err(|error| format!("{error}"))?;
    let object = Object::open(&url, &ObjectOptions::default(), Some(&config), Arc::new(Direct));
    let object: Arc<dyn Store> = Arc::new(object.map_err(|error| format!("does not open: {error}"))?);
    let kept = object.status().cache.map_or(0, |cache| cache.used_bytes);
    let disk = Disk::open(&LayerSource::Store(object), Format::Raw, &[], Use::Read);
    let disk = disk.map_err(|error| format!("does not open: {error}"))?;
    let wanted = content(server.version.load(Ordering::SeqCst));
    for number in 0..2 + random.below(12) {
        let (at, len) = match number {
            0 => (0, SIZE),
            _ => (random.below(SIZE / SECTOR) * SECTOR, SECTOR * (1 + random.below(3 * CHUNK / SECTOR))),
        };
        let mut found = vec![0; len.min(SIZE - at)];
        disk.read(&mut found, at as u64).map_err(|error| format!("a read fails: {error}"))?;
        let wrong = found.chunks(SECTOR).zip(wanted[at..].chunks(SECTOR)).position(|(one, two)| one != two);
        if let Some(sector) = wrong {
            let found = stamp::describe(&found[sector * SECTOR..][..SECTOR]);
            return Err(format!("the cache is wrong: sector {} reads as {found}", at / SECTOR + sector));
        }
        for (name, bytes) in read(folder).map_err(text)? {
            versions.entry(name).or_default().push(bytes);
        }
    }
    Ok((versions, kept))
}

fn read(folder: &Path) -> std::io::Result<Vec<(OsString, Vec<u8>)>> {
    let entries = fs::read_dir(folder)?.map(|entry| {
        let entry = entry?;
        Ok((entry.file_name(), fs::read(entry.path())?))
    });
    entries.collect()
}

/// What the object holds in a version.
fn content(version: u64) -> Vec<u8> {
    let mut content = vec![0; SIZE];
    stamp::fill(&mut content, 1 + version, 0);
    content
}

/// A server of one object, of which there are two versions.
struct Server {
    url: String,
    version: Arc<AtomicU64>,
}

impl Server {
    fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}/disk", listener.local_addr()?);
        let version = Arc::new(AtomicU64::new(0));
        let served = version.clone();
        // Ends with the process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let version = served.clone();
                std::thread::spawn(move || serve(&stream, &version));
            }
        });
        Ok(Self { url, version })
    }
}

/// Answers requests for ranges until the client leaves.
fn serve(stream: &TcpStream, version: &AtomicU64) -> Option<()> {
    let mut lines = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            lines.read_line(&mut head).ok().filter(|len| *len > 0)?;
        }
        let head = head.to_lowercase();
        let range = head.split_once("range: bytes=")?.1.split("\r\n").next()?;
        let (first, last) = range.split_once('-')?;
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?.min(SIZE - 1));
        let version = version.load(Ordering::SeqCst);
        let body = &content(version)[first..=last];
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nETag: \"{version}\"\r\nContent-Range: bytes {first}-{last}/{SIZE}\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        (&mut &*stream).write_all(&[head.as_bytes(), body].concat()).ok()?;
    }
}
