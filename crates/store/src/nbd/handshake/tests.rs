//! Negotiations with servers that follow a script.
use super::*;
use std::io::Cursor;

/// What the server sends, and what it gets.
struct Script {
    says: Cursor<Vec<u8>>,
    got: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.says.read(out)
    }
}

impl Write for Script {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.got.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn script(parts: &[&[u8]]) -> Script {
    Script { says: Cursor::new(parts.concat()), got: Vec::new() }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut message = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend(kind.to_be_bytes());
    message.extend((data.len() as u32).to_be_bytes());
    message.extend(data);
    message
}

fn info(kind: u16, data: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], data].concat()
}

fn size(option: u32, size: u64) -> Vec<u8> {
    reply(option, REP_INFO, &info(INFO_EXPORT, &[&size.to_be_bytes()[..], &[1, 5]].concat()))
}

const UNSUPPORTED: u32 = REP_ERROR | 1;
const GREETING: Greeting = Greeting { no_zeroes: true };

#[test]
fn a_greeting_is_answered_with_what_both_know() {
    let mut server = script(&[b"NBDMAGICIHAVEOPT", &[0xff, 0xff]]);
    assert!(greet(&mut server).unwrap().no_zeroes);
    assert_eq!(server.got, [0, 0, 0, 3]);
    let mut server = script(&[b"NBDMAGICIHAVEOPT", &[0, 1]]);
    assert!(!greet(&mut server).unwrap().no_zeroes);
    assert_eq!(server.got, [0, 0, 0, 1]);
}

#[test]
fn what_is_no_newstyle_server_is_told() {
    let wrong = |says: &[u8]| greet(&mut script(&[says])).unwrap_err();
    assert!(matches!(wrong(b"SSH-2.0-OpenSSH_9"), NbdError::NoServer(_)));
    assert!(matches!(wrong(b"NBDMAGICxxxxxxxx"), NbdError::NoServer(_)));
    assert!(matches!(wrong(b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53"), NbdError::Oldstyle));
    assert!(matches!(wrong(b"NBDMAGICIHAVEOPT\x00\x02"), NbdError::Protocol(_)));
    assert!(wrong(b"NBDMA").to_string().contains("has closed the connection"));
}

#[test]
fn an_export_with_all_that_there_is() {
    let mut server = script(&[
        &reply(OPT_EXTENDED_HEADERS, REP_ACK, &[]),
        &reply(OPT_SET_META_CONTEXT, REP_META_CONTEXT, b"\x00\x00\x00\x2abase:allocation"),
        &reply(OPT_SET_META_CONTEXT, REP_META_CONTEXT, b"\x00\x00\x00\x07other:context"),
        &reply(OPT_SET_META_CONTEXT, REP_ACK, &[]),
        // Unknown information is skipped.
        &reply(OPT_GO, REP_INFO, &info(77, b"?")),
        &reply(OPT_GO, REP_INFO, &info(INFO_BLOCK_SIZE, &[0, 0, 2, 0, 0, 0, 16, 0, 1, 0, 0, 0])),
        &size(OPT_GO, 1 << 30),
        &reply(OPT_GO, REP_ACK, &[]),
    ]);
    let export = choose(&mut server, GREETING, "disk", Purpose::Transmit).unwrap();
    assert_eq!((export.size, export.flags, export.style), (1 << 30, 0x0105, ReplyStyle::Extended));
    assert_eq!((export.block, export.preferred, export.payload), (512, 4096, 16 << 20));
    assert_eq!(export.allocation, Some(42));
    let go = b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x0c\x00\x00\x00\x04disk\x00\x01\x00\x03";
    assert!(server.got.ends_with(go));
}

#[test]
fn a_server_that_knows_little() {
    let unknown = [
        reply(OPT_EXTENDED_HEADERS, UNSUPPORTED, b"what?"),
        reply(OPT_STRUCTURED_REPLY, UNSUPPORTED, &[]),
        reply(OPT_GO, UNSUPPORTED, &[]),
    ]
    .concat();
    let export = [&[0; 6][..], &[1, 0], &[0, 1]].concat();
    let mut server = script(&[&unknown, &export]);
    let found = choose(&mut server, GREETING, "disk", Purpose::Transmit).unwrap();
    assert_eq!((found.size, found.flags, found.style), (256, 1, ReplyStyle::Simple));
    // With zeroes behind it.
    let mut server = script(&[&unknown, &export, &[0; 124]]);
    choose(&mut server, Greeting { no_zeroes: false }, "disk", Purpose::Transmit).unwrap();
    assert_eq!(server.says.position() as usize, server.says.get_ref().len());
    // To look at an export needs GO.
    let looks = [&unknown[..unknown.len() - 20], &reply(OPT_INFO, UNSUPPORTED, &[])].concat();
    let error = choose(&mut script(&[&looks]), GREETING, "disk", Purpose::Look).unwrap_err();
    assert!(matches!(error, NbdError::Refused { .. }), "{error}");
}

#[test]
fn refusals_are_told() {
    let structured = [
        reply(OPT_EXTENDED_HEADERS, UNSUPPORTED, &[]),
        reply(OPT_STRUCTURED_REPLY, REP_ACK, &[]),
        reply(OPT_SET_META_CONTEXT, UNSUPPORTED, &[]),
    ]
    .concat();
    let go = |code: u32| {
        let refused = reply(OPT_GO, REP_ERROR | code, b"for \x1btest");
        choose(&mut script(&[&structured, &refused]), GREETING, "disk", Purpose::Transmit).unwrap_err()
    };
    assert!(matches!(go(5), NbdError::NeedsTls));
    assert_eq!(go(6).to_string(), "the server has no export of this name: for test");
    assert_eq!(go(2).to_string(), "the server refuses the export with forbidden by policy: for test");
    let first = reply(OPT_EXTENDED_HEADERS, REP_ERROR | 5, &[]);
    let error = choose(&mut script(&[&first]), GREETING, "disk", Purpose::Transmit).unwrap_err();
    assert!(matches!(error, NbdError::NeedsTls));
    assert!(start_tls(&mut script(&[&reply(OPT_STARTTLS, REP_ACK, &[])])).is_ok());
    let error = start_tls(&mut script(&[&reply(OPT_STARTTLS, REP_ERROR | 2, &[])])).unwrap_err();
    assert_eq!(error.to_string(), "the server refuses TLS with forbidden by policy");
}

#[test]
fn malformed_replies_are_told() {
    let begin = reply(OPT_EXTENDED_HEADERS, REP_ACK, &[]);
    let context = reply(OPT_SET_META_CONTEXT, REP_ACK, &[]);
    let wrong = |says: &[u8], part: &str| {
        let mut server = script(&[&begin, &context, says]);
        let error = choose(&mut server, GREETING, "disk", Purpose::Transmit).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    wrong(&reply(OPT_GO, REP_ACK, &[]), "no size");
    wrong(&reply(OPT_INFO, REP_ACK, &[]), "for option 6");
    wrong(&reply(OPT_GO, REP_INFO, &info(INFO_EXPORT, &[0; 9])), "has 11 bytes");
    wrong(&reply(OPT_GO, REP_INFO, &info(INFO_BLOCK_SIZE, &[0; 11])), "has 13 bytes");
    let blocks = info(INFO_BLOCK_SIZE, &[0, 0, 2, 1, 0, 0, 16, 0, 1, 0, 0, 0]);
    let list = [reply(OPT_GO, REP_INFO, &blocks), size(OPT_GO, 512), reply(OPT_GO, REP_ACK, &[])].concat();
    wrong(&list, "513");
    wrong(&reply(OPT_GO, REP_INFO, &info(9, b"?")).repeat(REPLIES + 1), "more than 256 replies");
    let mut long = reply(OPT_GO, REP_INFO, &[]);
    long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    wrong(&long, "4294967295 bytes");
    wrong(&long[..10], "has closed the connection");
    wrong(&[9; 20], "begins with 0x909090909090909");
}
