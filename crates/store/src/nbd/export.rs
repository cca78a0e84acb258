//! What a server says of an export.
use super::error::NbdError;
use super::flag;
use super::reply::ReplyStyle;

/// Largest payload in bytes of a server that names none.
const PAYLOAD: u32 = 32 << 20;
/// Largest block in bytes that guests know.
const BLOCK: u32 = 4096;
/// Sector of a disk in bytes.
const SECTOR: u32 = 512;

/// An export, as negotiated for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    /// Size in bytes.
    pub(super) size: u64,
    /// Transmission flags.
    pub(super) flags: u16,
    pub(super) style: ReplyStyle,
    /// Smallest block in bytes.
    pub(super) block: u32,
    /// Block in bytes that needs no more work than it must.
    pub(super) preferred: u32,
    /// Largest payload in bytes: a multiple of `block`.
    pub(super) payload: u32,
    /// Number of the context of holes and zeroes.
    pub(super) allocation: Option<u32>,
}

impl Export {
    /// An export of a server that has said nothing else.
    pub(super) fn new(size: u64, flags: u16, style: ReplyStyle) -> Self {
        Self { size, flags, style, block: 1, preferred: BLOCK, payload: PAYLOAD, allocation: None }
    }

    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn is_extended(&self) -> bool {
        self.style == ReplyStyle::Extended
    }

    /// Takes the sizes of blocks over.
    pub(super) fn limit(&mut self, block: u32, preferred: u32, payload: u32) -> Result<(), NbdError> {
        let wrong = |what: String| Err(NbdError::Protocol(what));
        if !block.is_power_of_two() || block > 1 << 16 {
            return wrong(format!(
                "its smallest block has {block} bytes, which is no power of two up to 65536"
            ));
        }
        if !preferred.is_power_of_two() || preferred < block {
            return wrong(format!("its preferred block has {preferred} bytes, the smallest {block}"));
        }
        let granule = block.max(SECTOR);
        let payload = payload.min(PAYLOAD) / granule * granule;
        if payload == 0 {
            return wrong(format!("it takes no payload of {granule} bytes"));
        }
        (self.block, self.preferred, self.payload) = (block, preferred, payload);
        Ok(())
    }

    /// Checks what does not change with time.
    pub(super) fn check(&self) -> Result<(), NbdError> {
        if self.block > BLOCK {
            return Err(NbdError::Block(self.block));
        }
        if self.size > i64::MAX as u64 {
            return Err(NbdError::Protocol(format!("its export has {} bytes", self.size)));
        }
        if !self.size.is_multiple_of(self.block.into()) {
            return Err(NbdError::Protocol(format!(
                "its export has {} bytes, which is not a multiple of its smallest block, {}: the end cannot be read",
                self.size, self.block
            )));
        }
        Ok(())
    }

    /// Block that limits tell.
    pub(super) fn physical_block(&self) -> u32 {
        self.preferred.clamp(self.block.max(SECTOR), BLOCK)
    }

    /// Why the export cannot replace the one that was opened, if it cannot.
    pub(super) fn differs(&self, opened: &Opened) -> Option<String> {
        if self.size < opened.size {
            return Some(format!("the export has shrunk from {} to {} bytes", opened.size, self.size));
        }
        if self.has(flag::READ_ONLY) && !opened.read_only {
            return Some("the export has become read-only".into());
        }
        if self.block > opened.block {
            return Some(format!(
                "blocks of the export have grown from {} to {} bytes",
                opened.block, self.block
            ));
        }
        if opened.connections > 1 && !self.has(flag::CAN_MULTI_CONN) {
            return Some(format!(
                "the export now takes one connection, but {} are in use",
                opened.connections
            ));
        }
        self.check().err().map(|error| error.to_string())
    }
}

/// What the owner of a store relies on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub(super) size: u64,
    pub(super) read_only: bool,
    pub(super) block: u32,
    pub(super) connections: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> Export {
        Export::new(1 << 20, flag::CAN_MULTI_CONN, ReplyStyle::Structured)
    }

    #[test]
    fn sizes_of_blocks_are_checked() {
        for (block, preferred, payload) in [(3, 4096, 1 << 20), (0, 512, 512), (1 << 17, 1 << 17, 1 << 20)] {
            assert!(export().limit(block, preferred, payload).is_err());
        }
        assert!(export().limit(4096, 512, 1 << 20).is_err());
        assert!(export().limit(4096, 4096, 4095).is_err());
        let mut limited = export();
        limited.limit(1, 65536, u32::MAX).unwrap();
        assert_eq!((limited.block, limited.physical_block(), limited.payload), (1, 4096, 32 << 20));
        limited.limit(512, 512, 100_000).unwrap();
        assert_eq!(limited.payload, 195 * 512);
        limited.limit(1 << 16, 1 << 16, 1 << 20).unwrap();
        assert!(matches!(limited.check(), Err(NbdError::Block(65536))));
    }

    #[test]
    fn an_export_whose_end_cannot_be_read_is_refused() {
        let mut odd = Export::new(10_000, 0, ReplyStyle::Simple);
        odd.check().unwrap();
        odd.limit(4096, 4096, 1 << 20).unwrap();
        let refused = odd.check().unwrap_err().to_string();
        assert!(refused.contains("10000 bytes") && refused.contains("4096"), "{refused}");
    }

    #[test]
    fn an_export_that_has_changed_is_told() {
        let opened = Opened { size: 1 << 20, read_only: false, block: 1, connections: 2 };
        assert_eq!(export().differs(&opened), None);
        let grown = Export { size: 1 << 21, ..export() };
        assert_eq!(grown.differs(&opened), None);
        let part = |export: Export, text: &str| {
            let why = export.differs(&opened).unwrap();
            assert!(why.contains(text), "{why}");
        };
        part(Export { size: 1 << 19, ..export() }, "shrunk from 1048576 to 524288");
        part(Export { flags: flag::CAN_MULTI_CONN | flag::READ_ONLY, ..export() }, "read-only");
        part(Export { flags: 0, ..export() }, "one connection");
        let mut blocks = export();
        blocks.limit(512, 512, 1 << 20).unwrap();
        part(blocks, "from 1 to 512");
    }
}
