//! ACPI tables for Linux: processor, interrupts, console, devices, power switch.
//!
//! ```text
//! RSDP -> XSDT -> FADT -> DSDT    console, virtio-mmio devices or the PCI root, \_S5
//!              -> MADT            the processors, one I/O APIC
//!              -> MCFG            PCI: where the configuration spaces are
//! ```
//! Hardware-reduced (ACPI 6.5, section 4.1): no fixed hardware but the sleep and reset registers in
//! [`super::super::ports`].
use crate::arch::x86_64::ports::{
    CONSOLE_GSI, RESET, RESET_VALUE, S5, SLEEP_CONTROL, SLEEP_STATUS, UART, UART_PORTS,
};
use crate::machine::attach::{Attached, Window};
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, ONE,
    Package, PackageBuilder, Path, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as Space, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use paravane_spec::builtin::{PCI_ECAM, PCI_WINDOW};
use paravane_spec::pci::ecam;

const OEM: [u8; 6] = *b"PARAVN";
const TABLE: [u8; 8] = *b"PARAVANE";
const REVISION: u32 = 1;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
/// FADT boot architecture flags: no VGA, no PCIe power management, no CMOS clock.
///
/// There is no keyboard controller either.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 4 | 1 << 5;

/// All tables for guest-physical address `at`; the RSDP is the first.
pub(super) fn tables(at: u64, attached: &Attached, cpus: u16) -> Vec<u8> {
    let mut tables = Tables { at, bytes: vec![0; Rsdp::len()] };
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    let dsdt = tables.add(&dsdt(attached));
    xsdt.add_entry(tables.add(&fadt(dsdt)));
    xsdt.add_entry(tables.add(&madt(cpus)));
    if let Attached::Pci(_) = attached {
        let mut mcfg = MCFG::new(OEM, TABLE, REVISION);
        mcfg.add_ecam(PCI_ECAM, 0, 0, 0);
        xsdt.add_entry(tables.add(&mcfg));
    }
    let xsdt = tables.add(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    tables.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    tables.bytes
}

/// Consecutive tables.
struct Tables {
    at: u64,
    bytes: Vec<u8>,
}

impl Tables {
    /// Adds a table and returns its address.
    fn add(&mut self, table: &dyn Aml) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let at = self.at + self.bytes.len() as u64;
        table.to_aml_bytes(&mut self.bytes);
        at
    }
}

/// A complete table.
struct Ready(Sdt);

impl Aml for Ready {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0.as_slice());
    }
}

fn port(port: u16) -> GAS {
    GAS::new(Space::SystemIo, 8, 0, AccessSize::ByteAccess, port.into())
}

fn fadt(dsdt: u64) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = port(RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL);
    fadt.sleep_status_reg = port(SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u16) -> impl Aml {
    let mut madt = MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for number in 0..cpus as u8 {
        madt.add_structure(ProcessorLocalApic::new(number, number, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    madt
}

fn dsdt(attached: &Attached) -> impl Aml + use<> {
    let mut body = Vec::new();
    uart(&mut body);
    match attached {
        Attached::Mmio(windows) => {
            for (number, window) in windows.iter().enumerate() {
                mmio_device(&mut body, number, window);
            }
        }
        Attached::Pci(gsis) => pci_root(&mut body, gsis),
    }
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM, TABLE, REVISION);
    dsdt.append_slice(&Scope::raw("_SB_".into(), body));
    let mut off = Vec::new();
    Name::new("_S5_".into(), &Package::new(vec![&S5, &ZERO, &ZERO, &ZERO])).to_aml_bytes(&mut off);
    dsdt.append_slice(&off);
    Ready(dsdt)
}

/// A device with hardware identifier, number and resources.
fn device(
    body: &mut Vec<u8>,
    name: &str,
    id: &dyn Aml,
    number: usize,
    resources: Vec<&dyn Aml>,
    more: &[&dyn Aml],
) {
    let (id, number) = (Name::new("_HID".into(), id), Name::new("_UID".into(), &number));
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(resources));
    let mut children: Vec<&dyn Aml> = vec![&id, &number, &resources];
    children.extend(more);
    Device::new(name.into(), children).to_aml_bytes(body);
}

fn uart(body: &mut Vec<u8>) {
    let ports = IO::new(UART, UART, 1, UART_PORTS);
    let interrupt = Interrupt::new(true, true, false, false, CONSOLE_GSI);
    device(body, "COM1", &EISAName::new("PNP0501"), 0, vec![&ports, &interrupt], &[]);
}

/// Its interrupts are edges: the device raises the line anew for each.
fn mmio_device(body: &mut Vec<u8>, number: usize, window: &Window) {
    let registers = Memory32Fixed::new(true, window.base, window.size);
    let interrupt = Interrupt::new(true, true, false, false, window.gsi);
    // Its memory accesses are coherent with the processor's caches.
    let coherent = Name::new("_CCA".into(), &ONE);
    device(body, &format!("VR{number:02X}"), &"LNRO0005", number, vec![&registers, &interrupt], &[&coherent]);
}

fn link_name(number: u32) -> String {
    format!("LN{number:02X}")
}

/// Link device that connects a pin to an interrupt line, permanently.
///
/// It declares the pin as an edge, as our interrupts are. Without it the pin would be
/// level-triggered, and an interrupt raised between the driver's look at the ring and its end of
/// interrupt would be lost.
fn link(body: &mut Vec<u8>, name: &str, number: u32, gsi: u32) {
    let interrupt = Interrupt::new(true, true, false, false, gsi);
    // Possible settings, current setting, and the method that sets it.
    let possible = Name::new("_PRS".into(), &ResourceTemplate::new(vec![&interrupt]));
    let choose = Method::new("_SRS".into(), 1, false, Vec::new());
    device(body, name, &EISAName::new("PNP0C0F"), number as usize, vec![&interrupt], &[&possible, &choose]);
}

/// The PCI root, and the reservation of its configuration spaces.
///
/// Linux does not use them without the reservation.
fn pci_root(body: &mut Vec<u8>, gsis: &[u32]) {
    let (first, last) = (PCI_WINDOW.start as u32, (PCI_WINDOW.end - 1) as u32);
    let bus = AddressSpace::new_bus_number(0_u16, 0);
    let bars = AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None);
    let compatible = Name::new("_CID".into(), &EISAName::new("PNP0A03"));
    let segment = Name::new("_SEG".into(), &ZERO);
    let number = Name::new("_BBN".into(), &ZERO);
    let coherent = Name::new("_CCA".into(), &ONE);
    let mut routes = PackageBuilder::new();
    for (&gsi, number) in gsis.iter().zip(0_u32..) {
        let name = link_name(number);
        link(body, &name, number, gsi);
        // Any function of the device, pin A, the link. Device 0 is the bridge.
        let name: Path = name.as_str().into();
        routes.add_element(&Package::new(vec![&((number + 1) << 16 | 0xffff), &ZERO, &name, &ZERO]));
    }
    let routes = Name::new("_PRT".into(), &routes);
    let more: [&dyn Aml; 5] = [&compatible, &segment, &number, &coherent, &routes];
    device(body, "PCI0", &EISAName::new("PNP0A08"), 0, vec![&bus, &bars], &more);
    let spaces = Memory32Fixed::new(true, PCI_ECAM as u32, ecam::BUS as u32);
    device(body, "ECAM", &EISAName::new("PNP0C02"), 0, vec![&spaces], &[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0xe_0000;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    /// The table at a guest-physical address; its checksum holds.
    fn table(bytes: &[u8], addr: u64) -> &[u8] {
        let bytes = &bytes[usize::try_from(addr - AT).unwrap()..];
        let table = &bytes[..u32_at(bytes, 4) as usize];
        assert_eq!(sum(table), 0, "{:?}", String::from_utf8_lossy(&table[..4]));
        table
    }

    /// The tables that the RSDP leads to, and the DSDT behind the FADT.
    fn follow(bytes: &[u8]) -> Vec<&[u8]> {
        assert_eq!(&bytes[..8], b"RSD PTR ");
        assert_eq!((sum(&bytes[..20]), sum(&bytes[..36])), (0, 0));
        let xsdt = table(bytes, u64_at(bytes, 24));
        assert_eq!(&xsdt[..4], b"XSDT");
        let mut found: Vec<&[u8]> =
            (36..xsdt.len()).step_by(8).map(|at| table(bytes, u64_at(xsdt, at))).collect();
        assert_eq!(&found[0][..4], b"FACP");
        found.push(table(bytes, u64_at(found[0], 140)));
        found
    }

    fn names<'a>(tables: &[&'a [u8]]) -> Vec<&'a [u8]> {
        tables.iter().map(|table| &table[..4]).collect()
    }

    fn holds(table: &[u8], what: &[u8]) -> bool {
        table.windows(what.len()).any(|bytes| bytes == what)
    }

    #[test]
    fn the_tables_lead_to_each_other() {
        let windows = [0xd000_0000, 0xd000_2000].map(|base| Window { base, size: 0x1000, gsi: 5 });
        let mmio = tables(AT, &Attached::Mmio(windows.to_vec()), 1);
        let found = follow(&mmio);
        assert_eq!(names(&found), [b"FACP", b"APIC", b"DSDT"]);
        let dsdt = found[2];
        for window in windows {
            let registers = [window.base.to_le_bytes(), window.size.to_le_bytes()].concat();
            assert!(holds(dsdt, &[&[0x86, 9, 0, 1], &*registers].concat()), "{window:x?}");
        }
        assert!(holds(dsdt, b"VR00") && holds(dsdt, b"VR01") && holds(dsdt, b"LNRO0005\0"));
        assert!(!holds(dsdt, b"PCI0"));

        let pci = tables(AT, &Attached::Pci(vec![5, 6]), 1);
        let found = follow(&pci);
        assert_eq!(names(&found), [b"FACP", b"APIC", b"MCFG", b"DSDT"]);
        assert_eq!((u64_at(found[2], 44), found[2][54], found[2][55]), (PCI_ECAM, 0, 0));
        assert!(holds(found[3], b"PCI0") && !holds(found[3], b"VR00"));
        // Endpoint 1, pin A, its link, whose line 6 is an edge, active high.
        assert!(holds(found[3], b"\x0c\xff\xff\x02\0\0LN01\0"));
        assert!(holds(found[3], &[0x89, 6, 0, 3, 1, 6, 0, 0, 0]));
    }

    #[test]
    fn the_fixed_description_names_the_power_registers() {
        let bytes = tables(AT, &Attached::Mmio(Vec::new()), 3);
        let fadt = follow(&bytes)[0];
        assert_eq!(fadt.len(), 276);
        // Hardware-reduced, with a reset register.
        assert_eq!(u32_at(fadt, 112) & (1 << 20 | 1 << 10), 1 << 20 | 1 << 10);
        let register = |at: usize| (fadt[at], u64_at(fadt, at + 4));
        assert_eq!(register(116), (1, RESET.into()));
        assert_eq!(fadt[128], RESET_VALUE);
        assert_eq!(register(244), (1, SLEEP_CONTROL.into()));
        assert_eq!(register(256), (1, SLEEP_STATUS.into()));
    }

    #[test]
    fn each_processor_has_its_number() {
        let bytes = tables(AT, &Attached::Mmio(Vec::new()), 3);
        let madt = follow(&bytes)[1];
        // Local APIC: type, length, processor, APIC id, enabled.
        let processor = |number: u8| [0, 8, number, number, 1, 0, 0, 0];
        assert!((0..3).all(|number| holds(madt, &processor(number))) && !holds(madt, &processor(3)));
    }

    #[test]
    fn the_largest_machine_fits_below_1_mib() {
        let window = Window { base: u32::MAX - 0xfff, size: 0x1000, gsi: 23 };
        for attached in [Attached::Mmio(vec![window; 32]), Attached::Pci(vec![23; 31])] {
            assert!(tables(AT, &attached, 64).len() <= 0x2_0000);
        }
    }
}
