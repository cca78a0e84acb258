use super::*;
use crate::memory::ClientMemory;
use crate::message::SharedRegion;
use paravane_dma::{Backing, DmaError, DmaFault, MappingQuota, Region, RegionConfig};
use paravane_spec::vhost_user::MemoryRegion;
use proptest::prelude::*;
use std::sync::Mutex;

const BOTH: u8 = iotlb::READ | iotlb::WRITE;
const USER: u64 = 0x7f00_0000_0000;
/// Pages of the client: two regions, adjacent there and not in the guest.
const FIRST: u64 = 5;
const SECOND: u64 = 7;
/// Guest-physical addresses of the regions, in pages.
const AT: [u64; 2] = [0x100, 0x50];
/// IOVA pages in the model; the last one ends at the end of the address space.
const PAGES: u64 = 24;
const BASE: u64 = u64::MAX - (PAGES * PAGE - 1);

fn shared(gpa: u64, user: u64, pages: u64) -> SharedRegion {
    let size = pages * PAGE;
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let file = Region::new(config).unwrap().fd().unwrap().try_clone_to_owned().unwrap();
    SharedRegion { region: MemoryRegion { gpa, size, user, offset: 0 }, file }
}

/// Each page begins with its guest page number.
fn memory() -> ClientMemory {
    let mut memory = ClientMemory::new(MappingQuota::default()).unwrap();
    let first = shared(AT[0] * PAGE, USER, FIRST);
    let second = shared(AT[1] * PAGE, USER + FIRST * PAGE, SECOND);
    let regions = memory.with_all(vec![first, second]).unwrap();
    memory.publish(regions).unwrap();
    let mut handle = memory.memory().handle();
    let guard = handle.enter();
    for page in (AT[0]..AT[0] + FIRST).chain(AT[1]..AT[1] + SECOND) {
        guard.write_obj(page * PAGE, &page, Access::WRITE).unwrap();
    }
    drop(guard);
    memory
}

/// Guest page of a user page.
fn guest(user: u64) -> Option<u64> {
    match user {
        0..FIRST => Some(AT[0] + user),
        user if user < FIRST + SECOND => Some(AT[1] + user - FIRST),
        _ => None,
    }
}

fn said(page: u64, pages: u64, user: u64, perm: u8) -> Iotlb {
    let (iova, size, user) = (BASE + page * PAGE, pages * PAGE, USER.wrapping_add(user * PAGE));
    Iotlb { iova, size, user, perm, ..Iotlb::default() }
}

fn translations(memory: &ClientMemory) -> Translations {
    Translations::new(memory.memory(), 64 << 20, |_| ())
}

/// No wait is expected.
fn never(busy: &Busy) {
    panic!("{busy}");
}

/// Updates like a session.
fn update(known: &mut Translations, said: &Iotlb, memory: &ClientMemory) -> bool {
    let Some(piece) = Piece::new(said) else { return false };
    if known.contradicts(piece) {
        assert!(known.remove(piece.first, piece.last, &mut never));
    }
    known.insert(piece, memory.regions()).is_ok()
}

#[derive(Clone, Debug)]
enum Step {
    Update { page: u64, pages: u64, user: u64, perm: u8 },
    Invalidate { page: u64, pages: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..PAGES).prop_flat_map(|page| (Just(page), 1..=(PAGES - page).min(9)));
    let update = (range(), 0..FIRST + SECOND + 2, 1..=BOTH);
    prop_oneof![
        // Adjacent pages in the client's memory, as those of a guest mostly are.
        3 => (range(), any::<bool>(), 1..=BOTH).prop_map(|((page, pages), mirrored, perm)| {
            let user = if mirrored { page % (FIRST + SECOND) } else { page / 2 };
            Step::Update { page, pages, user, perm }
        }),
        2 => update.prop_map(|((page, pages), user, perm)| Step::Update { page, pages, user, perm }),
        2 => range().prop_map(|(page, pages)| Step::Invalidate { page, pages }),
    ]
}

proptest! {
    /// After any updates, each page has its last translation and permissions.
    #[test]
    fn a_page_means_what_was_said_last(steps in prop::collection::vec(step(), 1..60)) {
        let memory = memory();
        let mut known = translations(&memory);
        let mut handle = known.handle();
        let mut model: Vec<Option<(u64, u8)>> = vec![None; PAGES as usize];
        for step in steps {
            match step {
                Step::Update { page, pages, user, perm } => {
                    let new: Option<Vec<u64>> = (user..user + pages).map(guest).collect();
                    let range = page as usize..(page + pages) as usize;
                    let told = |at: usize| user + (at - page as usize) as u64;
                    // What contradicts goes, even if what comes in its place is refused.
                    let contradicts = range.clone().any(|at| {
                        model[at].is_some_and(|(old, allowed)| allowed != perm || guest(told(at)) != Some(old))
                    });
                    if contradicts {
                        model[range.clone()].fill(None);
                    }
                    prop_assert_eq!(update(&mut known, &said(page, pages, user, perm), &memory), new.is_some());
                    for (at, guest) in range.zip(new.into_iter().flatten()) {
                        model[at] = Some((guest, perm));
                    }
                }
                Step::Invalidate { page, pages } => {
                    let (first, last) = touched_pages(&said(page, pages, 0, 0));
                    prop_assert!(known.remove(first, last, &mut never));
                    model[page as usize..(page + pages) as usize].fill(None);
                }
            }
            let guard = handle.enter();
            for (page, meaning) in (0..).zip(&model) {
                let at = BASE + page * PAGE;
                prop_assert_eq!(guard.translates(at, 1, Access::READ), meaning.is_some());
                let (read, write) = (guard.read_obj::<u64>(at, Access::READ), guard.write(at + 8, &[1], Access::WRITE));
                match *meaning {
                    None => {
                        let untranslated = |error| matches!(error, Err(DmaError { fault: DmaFault::Untranslated, .. }));
                        prop_assert!(untranslated(read.map(drop)) && untranslated(write));
                    }
                    Some((guest, perm)) => {
                        prop_assert_eq!(read.ok(), (perm & iotlb::READ != 0).then_some(guest));
                        prop_assert_eq!(write.is_ok(), perm & iotlb::WRITE != 0);
                    }
                }
            }
            // What adjoins is one piece, unless it is of several regions.
            let covered: u64 = known.pieces.values().map(|piece| (piece.last - piece.first) / PAGE + 1).sum();
            prop_assert_eq!(covered as usize, model.iter().flatten().count());
        }
    }
}

#[test]
fn what_means_nothing_is_no_translation() {
    let good = said(0, 1, 0, BOTH);
    assert!(Piece::new(&good).is_some());
    for bad in [
        Iotlb { perm: 0, ..good },
        Iotlb { perm: 4, ..good },
        Iotlb { size: 0, ..good },
        Iotlb { size: 4095, ..good },
        Iotlb { iova: 8, ..good },
        Iotlb { size: u64::MAX, ..good },
        Iotlb { size: PAGES * PAGE + PAGE, ..good },
        Iotlb { user: u64::MAX - 4094, ..good },
    ] {
        assert_eq!(Piece::new(&bad), None, "{bad:?}");
    }
    // Such a user address is in no page of the client's memory.
    let memory = memory();
    let odd = Iotlb { user: USER + 8, ..good };
    assert!(!update(&mut translations(&memory), &odd, &memory));
}

#[test]
fn an_invalidation_is_of_all_pages_that_it_touches() {
    let of = |iova, size| touched_pages(&Iotlb { iova, size, ..Iotlb::default() });
    assert_eq!(of(0x1000, 0x1000), (0x1000, 0x1fff));
    assert_eq!(of(0x1fff, 2), (0x1000, 0x2fff));
    assert_eq!(of(0x1000, 0), (0, u64::MAX), "2^64 bytes do not fit in 64 bits");
    assert_eq!(of(0x1234, u64::MAX), (0x1000, u64::MAX));
}

#[test]
fn translations_survive_a_change_of_memory_that_does_not_concern_them() {
    let memory = memory();
    let mut known = translations(&memory);
    assert!(update(&mut known, &said(0, 2, FIRST - 1, BOTH), &memory), "it lies in both regions");
    let more = memory.with(shared(0x100_0000, 0x1000, 1)).unwrap();
    assert!(known.survives(memory.regions(), &more));
    let second =
        MemoryRegion { gpa: AT[1] * PAGE, size: SECOND * PAGE, user: USER + FIRST * PAGE, offset: 0 };
    assert!(!known.survives(memory.regions(), &memory.without(second).unwrap()));
    // The same addresses, in another file.
    let first = shared(AT[0] * PAGE, USER, FIRST);
    let second = shared(AT[1] * PAGE, USER + FIRST * PAGE, SECOND);
    assert!(!known.survives(memory.regions(), &memory.with_all(vec![first, second]).unwrap()));
}

#[test]
fn who_holds_a_translation_is_waited_for() {
    let memory = memory();
    let mut known = translations(&memory);
    assert!(update(&mut known, &said(0, 3, 0, BOTH), &memory));
    let mut handle = known.handle();
    let held = Mutex::new(Some(handle.enter().map(BASE + PAGE, 8, Access::WRITE).unwrap()));
    let mut waited = 0;
    let removed = known.remove(BASE, BASE + 2 * PAGE - 1, &mut |_| {
        waited += 1;
        *held.lock().unwrap() = None;
    });
    assert!(removed && waited == 1);
    let guard = handle.enter();
    assert!(
        !guard.translates(BASE + PAGE, 1, Access::READ) && guard.translates(BASE + 2 * PAGE, 1, Access::READ)
    );
}

#[test]
fn the_number_of_pieces_has_a_limit() {
    let memory = memory();
    let mut known = translations(&memory);
    // Every other page, so that none adjoins.
    let piece = |number: usize| {
        let iova = number as u64 * 2 * PAGE;
        Piece::new(&Iotlb { iova, size: PAGE, user: USER, perm: BOTH, ..Iotlb::default() }).unwrap()
    };
    for number in 0..MAX_PIECES {
        assert_eq!(known.insert(piece(number), memory.regions()), Ok(()));
    }
    let one_more = piece(MAX_PIECES);
    assert_eq!(known.insert(one_more, memory.regions()), Err(Refused::Full));
    assert!(known.remove(0, PAGE - 1, &mut never));
    assert_eq!(known.insert(one_more, memory.regions()), Ok(()));
}
