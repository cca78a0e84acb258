//! CPUID of a guest: what KVM supports, with the topology of this machine.
//!
//! One package; each vCPU is a core with one thread. Its number is its APIC id.
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Leaf 1, ECX: TSC deadline mode of the local APIC timer; hypervisor bit.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: the package has several logical processors.
const HTT: u32 = 1 << 28;
/// Leaves that describe the host's topology level by level.
///
/// Extended topology, its second version, and AMD's.
const LEVELS: [u32; 3] = [0xb, 0x1f, 0x8000_0026];
/// Types of a level in leaf 0xb, in place: thread, core.
const THREADS: u32 = 1 << 8;
const CORES: u32 = 2 << 8;

/// A vCPU among those of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Number of the vCPU, from 0.
    pub(crate) number: u16,
    /// Number of vCPUs.
    pub(crate) count: u16,
}

impl Place {
    /// Bits of an APIC id.
    fn bits(self) -> u32 {
        self.count.next_power_of_two().trailing_zeros()
    }
}

/// The CPUID of one vCPU, from what KVM supports.
///
/// `None`: it has more entries than KVM takes.
pub(super) fn of_vcpu(supported: &CpuId, place: Place, tsc_deadline: bool) -> Option<CpuId> {
    let mut entries = supported.as_slice().to_vec();
    let has_levels = entries.iter().any(|entry| entry.function == LEVELS[0]);
    entries.retain(|entry| !LEVELS.contains(&entry.function));
    entries.iter_mut().for_each(|entry| adapt(entry, place, tsc_deadline));
    if has_levels {
        entries.extend(levels(place));
    }
    CpuId::from_entries(&entries).ok()
}

fn adapt(entry: &mut kvm_cpuid_entry2, place: Place, tsc_deadline: bool) {
    let (number, count) = (u32::from(place.number), u32::from(place.count));
    let last = count.next_power_of_two() - 1;
    match entry.function {
        1 => {
            entry.ecx |= HYPERVISOR;
            if tsc_deadline {
                entry.ecx |= TSC_DEADLINE;
            }
            // Number of this processor, and number of processors in the package.
            entry.ebx = entry.ebx & 0xffff | (last + 1) << 16 | number << 24;
            entry.edx = entry.edx & !HTT | if count > 1 { HTT } else { 0 };
        }
        // Caches: none is shared; highest number of a core in the package.
        4 => entry.eax = entry.eax & 0x3fff | last.min(0x3f) << 26,
        // AMD: caches, number of cores and of the bits of their ids, position of this processor.
        0x8000_001d => entry.eax &= 0x3fff,
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | place.bits() << 12 | (count - 1),
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (number, number, 0),
        _ => {}
    }
}

/// Extended topology: one thread in a core, all cores in the package.
fn levels(place: Place) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, processors, kind| kvm_cpuid_entry2 {
        function: LEVELS[0],
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: processors,
        ecx: kind | index,
        edx: place.number.into(),
        ..Default::default()
    };
    [level(0, 0, 1, THREADS), level(1, place.bits(), place.count.into(), CORES), level(2, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(function: u32) -> kvm_cpuid_entry2 {
        let (eax, edx) = (u32::MAX, u32::MAX);
        kvm_cpuid_entry2 { function, eax, ebx: 0x0702_0800, ecx: 0, edx, ..Default::default() }
    }

    fn guest(functions: &[u32], place: Place) -> Vec<kvm_cpuid_entry2> {
        let host: Vec<_> = functions.iter().map(|function| of(*function)).collect();
        let supported = CpuId::from_entries(&host).unwrap();
        of_vcpu(&supported, place, true).unwrap().as_slice().to_vec()
    }

    #[test]
    fn one_processor_on_a_hypervisor() {
        let guest = guest(&[1, 0xb, 0x1f, 7], Place { number: 0, count: 1 });
        let [features, other, thread, core, end] = guest.as_slice() else { panic!("{guest:?}") };
        assert_eq!(features.ecx, HYPERVISOR | TSC_DEADLINE);
        assert_eq!(features.ebx, 0x0001_0800);
        assert_eq!(features.edx & HTT, 0);
        assert_eq!(*other, of(7));
        assert_eq!((thread.eax, thread.ebx, thread.ecx), (0, 1, 0x100));
        assert_eq!((core.eax, core.ebx, core.ecx), (0, 1, 0x201));
        assert_eq!((end.ebx, end.ecx), (0, 2));
    }

    #[test]
    fn the_third_of_four_processors() {
        let guest = guest(&[1, 4, 0xb, 0x8000_0008, 0x8000_001e], Place { number: 2, count: 4 });
        let [features, caches, sizes, place, thread, core, _] = guest.as_slice() else { panic!("{guest:?}") };
        assert_eq!(features.ebx, 0x0204_0800);
        assert_ne!(features.edx & HTT, 0);
        assert_eq!(caches.eax, 3 << 26 | 0x3fff);
        assert_eq!(sizes.ecx, 0x2003);
        assert_eq!((place.eax, place.ebx, place.ecx), (2, 2, 0));
        assert_eq!((thread.eax, thread.ebx, thread.edx), (0, 1, 2));
        assert_eq!((core.eax, core.ebx, core.edx), (2, 4, 2));
    }

    #[test]
    fn every_number_has_an_id_of_its_own_in_a_range_that_is_told() {
        for count in 1..=64_u16 {
            for number in 0..count {
                let guest = guest(&[1, 0xb], Place { number, count });
                assert_eq!(guest[0].ebx >> 24, u32::from(number));
                assert!(u32::from(number) < 1 << guest[2].eax, "{number} of {count}");
            }
        }
    }

    #[test]
    fn a_host_without_levels_tells_none() {
        assert_eq!(guest(&[1, 7], Place { number: 0, count: 2 }).len(), 2);
    }
}
