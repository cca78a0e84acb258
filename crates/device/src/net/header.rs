//! The header before a frame, and its checks (sections 5.1.6.2 and 5.1.6.4).
//!
//! The host's kernel, or another guest, computes with these numbers. So nothing passes that was not
//! negotiated or points outside of the frame. Fields that are not needed are 0.
use paravane_dma::ReadSpan;
use paravane_spec::feature;
use paravane_spec::net::{
    self, ETH_HEADER, F_CSUM, F_HOST_ECN, F_HOST_TSO4, F_HOST_TSO6, F_HOST_USO, GSO_ECN, GSO_NONE, GSO_TCPV4,
    GSO_TCPV6, GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header,
};

/// Bytes of the header before each frame.
pub(super) const HEADER: usize = size_of::<Header>();
/// Bytes of the header of a legacy driver without MRG_RXBUF (section 5.1.6.1).
const LEGACY_HEADER: usize = HEADER - 2;

/// Bytes of the header before each frame in the buffers of a driver with `features`.
///
/// The last field is missing if it is shorter than [`HEADER`].
pub(super) fn header_len(features: u64) -> usize {
    if features & (feature::VERSION_1 | net::F_MRG_RXBUF) == 0 { LEGACY_HEADER } else { HEADER }
}

/// The rules for headers that follow from the negotiated features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    features: u64,
    /// See [`header_len`].
    pub(super) header_len: usize,
}

impl Rules {
    pub(super) fn new(features: u64) -> Self {
        Self { features, header_len: header_len(features) }
    }

    fn has(self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Whether a header can say anything.
    ///
    /// Without offloads it is all zero (section 5.1.6.2.1), and whatever else a driver writes there
    /// means nothing.
    pub(super) fn need_header(self) -> bool {
        self.has(F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_USO)
    }

    /// The header for the back end, of a frame of `len` bytes; `None` if it is invalid.
    #[inline(always)]
    pub(super) fn check(self, header: EncodedHeader, len: usize) -> Option<EncodedHeader> {
        if header.is_plain() {
            return Some(EncodedHeader::default());
        }
        let EncodedHeader([first, second, third]) = self.check_offloads(header, len)?;
        Some(EncodedHeader([first, second, third]))
    }

    /// [`Rules::check`] of a header that asks for something.
    #[inline(never)]
    fn check_offloads(self, header: EncodedHeader, len: usize) -> Option<EncodedHeader> {
        let header = header.decode();
        let mut checked = Header::default();
        // Section 5.1.6.2.2: bits that the device does not know are ignored.
        if header.flags & HDR_F_NEEDS_CSUM != 0 {
            let (start, offset) = (usize::from(header.csum_start), usize::from(header.csum_offset));
            if !self.has(F_CSUM) || start < ETH_HEADER || start + offset + 2 > len {
                return None;
            }
            checked.flags = HDR_F_NEEDS_CSUM;
            (checked.csum_start, checked.csum_offset) = (header.csum_start, header.csum_offset);
        }
        if header.gso_type == GSO_NONE {
            return Some(checked.into());
        }
        let ecn = header.gso_type & GSO_ECN != 0;
        let offered = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 => F_HOST_TSO4,
            GSO_TCPV6 => F_HOST_TSO6,
            GSO_UDP_L4 if !ecn => F_HOST_USO,
            _ => return None,
        };
        // Segmentation includes completing the checksums (section 5.1.6.2.1).
        let usable = self.has(offered) && (!ecn || self.has(F_HOST_ECN)) && checked.flags != 0;
        if !usable || header.gso_size == 0 {
            return None;
        }
        (checked.gso_type, checked.gso_size) = (header.gso_type, header.gso_size);
        // A hint, limited to the frame.
        checked.hdr_len = u16::try_from(len).map_or(header.hdr_len, |len| header.hdr_len.min(len));
        Some(checked.into())
    }
}

/// The header for a driver with `features`, and a frame in `buffers` buffers.
#[inline(always)]
pub(super) fn to_driver(header: EncodedHeader, features: u64, buffers: u16) -> EncodedHeader {
    // Section 5.1.6.4.1: without GUEST_CSUM the flags are 0. (Then nothing else was negotiated
    // either.)
    let kept = if features & net::F_GUEST_CSUM == 0 { 0 } else { u32::MAX };
    let [first, second, third] = header.0.map(|word| word & kept);
    // The last field.
    let mask = u32::from(u16::MAX).to_le();
    EncodedHeader([first, second, third & mask | (u32::from(buffers) << 16).to_le()])
}

/// A header as it lies in guest memory, in little endian.
///
/// In words, which stay in registers: a frame's header is passed on from one memory to the next, and
/// its fields matter only if it asks for something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodedHeader(pub(super) [u32; HEADER / 4]);

impl EncodedHeader {
    /// Whether it asks for nothing: no checksum is open, and the frame is no segment.
    #[must_use]
    #[inline(always)]
    pub fn is_plain(self) -> bool {
        let fields = u32::from(HDR_F_NEEDS_CSUM) | 0xff << 8;
        self.0[0] & fields.to_le() == 0
    }

    /// Its fields, in native byte order.
    #[must_use]
    pub fn decode(self) -> Header {
        swapped(zerocopy::transmute!(self.0))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(self) -> [u8; HEADER] {
        zerocopy::transmute!(self.0)
    }

    /// Reads it from memory that begins with it.
    #[inline(always)]
    pub(super) fn read(from: ReadSpan<'_>) -> Self {
        // Word by word: bytes that are stored to memory and read back in other pieces wait for all
        // earlier stores.
        Self([from.read_obj(0), from.read_obj(4), from.read_obj(8)])
    }
}

impl From<[u8; HEADER]> for EncodedHeader {
    #[inline(always)]
    fn from(bytes: [u8; HEADER]) -> Self {
        Self(zerocopy::transmute!(bytes))
    }
}

impl From<Header> for EncodedHeader {
    fn from(header: Header) -> Self {
        Self(zerocopy::transmute!(swapped(header)))
    }
}

/// Converts between little endian and native byte order.
fn swapped(header: Header) -> Header {
    Header {
        hdr_len: header.hdr_len.to_le(),
        gso_size: header.gso_size.to_le(),
        csum_start: header.csum_start.to_le(),
        csum_offset: header.csum_offset.to_le(),
        num_buffers: header.num_buffers.to_le(),
        ..header
    }
}

/// Completes the checksum of a frame with a checked header.
pub(super) fn complete_checksum(encoded: &mut EncodedHeader, frame: &mut [u8]) {
    if encoded.is_plain() {
        return;
    }
    let mut header = encoded.decode();
    if header.flags & HDR_F_NEEDS_CSUM == 0 {
        return;
    }
    header.flags = 0;
    let start = usize::from(header.csum_start);
    let place = start + usize::from(header.csum_offset);
    (header.csum_start, header.csum_offset) = (0, 0);
    *encoded = header.into();
    let Some(covered) = frame.get(start..) else { return };
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
    let mut sum: u64 = covered.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // RFC 768: a computed 0 is written as all ones, which means the same in every protocol.
    let checksum = match !(sum as u16) {
        0 => 0xffff,
        other => other,
    };
    if let Some(field) = frame.get_mut(place..place + 2) {
        field.copy_from_slice(&checksum.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::net::HDR_F_DATA_VALID;

    const ALL: u64 = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_USO;
    const TCP: Header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 0,
    };

    /// [`Rules::check`], in fields.
    fn check(features: u64, header: Header, len: usize) -> Option<Header> {
        Rules::new(features).check(header.into(), len).map(EncodedHeader::decode)
    }

    #[test]
    fn what_was_negotiated_passes_as_it_is() {
        assert_eq!(check(ALL, TCP, 9000), Some(TCP));
        let udp = Header { gso_type: GSO_UDP_L4, csum_offset: 6, ..TCP };
        assert_eq!(check(ALL, udp, 9000), Some(udp));
        let ecn = Header { gso_type: GSO_TCPV6 | GSO_ECN, ..TCP };
        assert_eq!(check(ALL | F_HOST_ECN, ecn, 9000), Some(ecn));
        let plain = Header { gso_type: GSO_NONE, gso_size: 0, hdr_len: 0, ..TCP };
        assert_eq!(check(F_CSUM, plain, 52), Some(plain));
    }

    #[test]
    fn numbers_that_mean_nothing_do_not_pass_on() {
        let noise = Header { flags: 0xfe, gso_type: 0, num_buffers: 7, ..TCP };
        assert_eq!(check(ALL, noise, 60), Some(Header::default()));
        let long = Header { hdr_len: u16::MAX, ..TCP };
        assert_eq!(check(ALL, long, 60).unwrap().hdr_len, 60);
    }

    #[test]
    fn lies_are_seen() {
        let lies = [
            Header { csum_start: u16::MAX, ..TCP },
            Header { csum_offset: u16::MAX, ..TCP },
            Header { csum_start: 84, ..TCP },
            Header { csum_start: 13, ..TCP },
            Header { gso_size: 0, ..TCP },
            Header { gso_type: 2, ..TCP },
            Header { gso_type: 3, ..TCP },
            Header { gso_type: GSO_ECN, ..TCP },
            Header { gso_type: GSO_UDP_L4 | GSO_ECN, ..TCP },
            Header { gso_type: 0x7f, ..TCP },
            Header { flags: 0, ..TCP },
            Header { flags: HDR_F_DATA_VALID, ..TCP },
        ];
        for lie in lies {
            assert_eq!(check(ALL | F_HOST_ECN, lie, 100), None, "{lie:?}");
        }
        // The last two bytes of the frame are the checksum: just inside, and just outside.
        assert!(check(ALL, TCP, 52).is_some());
        assert!(check(ALL, TCP, 51).is_none());
        // What was not negotiated is a lie too.
        for missing in [F_CSUM, F_HOST_TSO4] {
            assert_eq!(check(ALL & !missing, TCP, 100), None);
        }
        assert_eq!(check(ALL, Header { gso_type: GSO_TCPV4 | GSO_ECN, ..TCP }, 100), None);
    }

    #[test]
    fn a_driver_is_told_what_it_accepted_and_no_more() {
        let to_driver = |features, buffers| to_driver(TCP.into(), features, buffers).decode();
        assert_eq!(to_driver(0, 3), Header { num_buffers: 3, ..Header::default() });
        assert_eq!(to_driver(net::F_GUEST_CSUM, 1), Header { num_buffers: 1, ..TCP });
    }

    #[test]
    fn a_header_is_twelve_bytes_in_little_endian() {
        let bytes = EncodedHeader::from(TCP).bytes();
        assert_eq!(bytes, [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
        assert_eq!(EncodedHeader::from(bytes).decode(), TCP);
    }

    #[test]
    fn checksums_come_out_right() {
        // RFC 1071's example: these words sum to 0xddf2.
        let mut frame = vec![0; ETH_HEADER];
        frame.extend([0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7, 0, 0, 0]);
        let open = Header { flags: HDR_F_NEEDS_CSUM, csum_start: 14, ..Header::default() };
        let mut header = Header { csum_offset: 8, ..open }.into();
        complete_checksum(&mut header, &mut frame);
        assert_eq!(header, EncodedHeader::default());
        assert_eq!(frame[22..24], (!0xddf2_u16).to_be_bytes());
        // A checksum of 0 is all ones.
        let mut frame = [[0; 14].as_slice(), &[0xff, 0xff, 0, 0]].concat();
        let mut header = Header { csum_offset: 2, ..open }.into();
        complete_checksum(&mut header, &mut frame);
        assert_eq!(frame[16..], [0xff, 0xff]);
        // Nothing to do.
        complete_checksum(&mut header, &mut []);
    }
}
