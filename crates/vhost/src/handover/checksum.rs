//! CRC-32 of a record (ISO-HDLC: polynomial 0xedb88320, as in zlib and Ethernet).
//!
//! It detects damage. It does not protect against forgery: a record is as hostile as a client.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

pub(super) fn checksum(bytes: &[u8]) -> u32 {
    let next = |sum: u32, byte: &u8| TABLE[usize::from(sum as u8 ^ byte)] ^ (sum >> 8);
    !bytes.iter().fold(!0, next)
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn it_is_the_crc_of_zlib() {
        assert_eq!(checksum(b""), 0);
        assert_eq!(checksum(b"123456789"), 0xcbf4_3926);
    }
}
